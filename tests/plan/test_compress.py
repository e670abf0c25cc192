"""Plans that keep what may be rounded in 8 bits: never slower than exact ones, and how far their gradients are off."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax._core.program import costs
from memjax._plan.budget.known import _known, forget
from memjax._plan.derivative import Derivative
from memjax._plan.flat import Flat
from memjax._plan.solve.chain import Chain
from tests.compress import transformer_layers as transformer
from tests.plan import networks

ROWS, WIDTH, HIDDEN, LAYERS = 256, 256, 1024, 3
BOTH = ("recompute", "compress")


@jax.jit
def parameters_and_input():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    shapes = {"up": (WIDTH, HIDDEN), "gate": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    one = lambda key: {name: 0.05 * jax.random.normal(key, shape) for name, shape in shapes.items()}
    return [one(key) for key in keys], jax.random.normal(jax.random.key(9), (ROWS, WIDTH))


def layer(p, x):
    return x + (jnp.tanh(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def unrolled(params, x):
    for p in params:
        x = layer(p, x)
    return jnp.mean(jnp.sin(x))


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)
    return jnp.mean(jnp.sin(x))


def transformed(params, x):
    for p in params:
        x = transformer.with_rule(p, x)
    return jnp.mean(x**2)


def arguments(f):
    if f is transformed:
        return [transformer.parameters(i) for i in range(2)], transformer.inputs()
    params, x = parameters_and_input()
    return (networks.stacked(params) if f is scanned else params), x


def coded(plan):
    return [kept for stretch in plan.stretches for kept in stretch.kept if kept.bits is not None]


@functools.cache
def with_codes(f, argnums=(0, 1)):
    """A plan that keeps something in codes."""
    plan = memjax.plan(f, *arguments(f), budget="min", allow=BOTH, argnums=argnums)
    assert coded(plan)
    return plan


def distance(got, expected):
    wide = lambda tree: np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
    return np.linalg.norm(wide(got) - wide(expected)) / np.linalg.norm(wide(expected))


def chain(f, *args, compress, device="H200", **options):
    flat = Flat(f, args, {})
    program = flat.program()
    wrt = [False] * len(program.closed.consts) + flat.float_arrays_of({0: None})
    derivative = Derivative(program.closed, program.types, wrt, program.has_cotangent, {})
    rates = next(rates for rates in costs._DEVICES if rates.kind == device)
    return Chain(derivative, rates, compress=compress, **options)


def large(a):
    return jax.ShapeDtypeStruct((*a.shape[:-2], 16 * a.shape[-2], 16 * a.shape[-1]), jnp.bfloat16)


@pytest.mark.parametrize("f", [unrolled, scanned])
def test_the_frontier_with_codes_is_nowhere_above_the_exact_one_and_below_it_somewhere(f):
    args = jax.tree.map(large, arguments(f))
    exact, both = (chain(f, *args, compress=compress).frontier for compress in (False, True))
    assert both[-1] == exact[-1]  # nothing in codes where there is room
    gains = []
    for nbytes, seconds in exact:
        best = min((other for room, other in both if room <= nbytes), default=np.inf)
        assert best <= seconds * (1 + 1e-9)
        gains.append(seconds - best)
    assert max(gains) > 0.1 * exact[0][1]


def test_layers_share_options_only_if_the_same_may_be_in_codes(monkeypatch):
    found = chain(unrolled, *jax.tree.map(large, arguments(unrolled)), compress=True, solved=False)
    stretches = [(a, a + size) for size in (1, 2) for a in range(len(found.cuts) - size)]
    coded = lambda: {var for ends in stretches for option in found.options(*ends) for var in option.coded}
    *others, last = sorted(coded(), key=found.derivative.forward.flow.place.get)
    nbytes = found.codes.nbytes
    monkeypatch.setattr(found.codes, "nbytes", lambda var: None if var is last else nbytes(var))
    assert {*others} <= coded()
    assert last not in coded()


def test_a_plan_that_may_use_codes_is_never_slower_than_an_exact_one():
    """The two searches compile a few plans each, not the same ones. Gradients through attention stay close."""
    f = transformed
    args = arguments(f)
    plain = jax.jit(jax.value_and_grad(f)).lower(*args).compile()
    budget = plain.memory_analysis().temp_size_in_bytes // 2
    exact, both = (memjax.plan(f, *args, budget=budget, allow=allow) for allow in (("recompute",), BOTH))
    assert both.seconds <= exact.seconds
    assert both.nbytes <= budget
    assert coded(both)
    got = jax.jit(jax.grad(memjax.planned(f, plan=both)))(*args)
    assert distance(got, plain(*args)[1]) < 0.01


def test_a_refusal_compiles_few_plans():
    """Those with codes, and of exact ones those of the least memory, which are often the same; and both in steps."""
    f = scanned
    args = arguments(f)
    least = min(memjax.plan(f, *args, budget="min", allow=allow).nbytes for allow in (("recompute",), BOTH))
    forget()
    with pytest.raises(ValueError, match="least possible"):
        memjax.plan(f, *args, budget=least - 1, allow=BOTH)
    assert sum(len(compiled) for compiled in {id(one.compiled): one.compiled for one in _known.values()}.values()) <= 10


def test_gradients_are_off_by_the_rounding_of_8_bits_and_values_not_at_all():
    f = unrolled
    args, plan = arguments(f), with_codes(f)
    exact = jax.jit(jax.value_and_grad(f, (0, 1)))
    run = jax.jit(jax.value_and_grad(memjax.planned(f, plan=plan), (0, 1)), donate_argnums=(1,))
    value, gradients = run(args[0], jnp.copy(args[1]))
    expected, wanted = exact(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert 1e-5 < distance(gradients, wanted) < 0.01


def test_codes_of_parts_of_a_loop_that_have_one_turn():
    """Such a part is no loop when it is compiled, but it has its codes, each of several arrays."""
    args, plan = arguments(scanned), with_codes(scanned)
    [i] = [i for i, stretch in enumerate(plan.stretches) if any(kept.bits for kept in stretch.kept)]
    stretch = plan.stretches[i]
    turns = [stretch._replace(turns=1, handed_on=stretch.handed_on if last else 0) for last in (False, False, True)]
    apart = dataclasses.replace(plan, stretches=(*plan.stretches[:i], *turns, *plan.stretches[i + 1 :]))
    found = jax.jit(jax.grad(memjax.planned(scanned, plan=apart), (0, 1)))(*args)
    assert 1e-5 < distance(found, jax.jit(jax.grad(scanned, (0, 1)))(*args)) < 0.01


def test_errors_average_out_over_the_dither():
    """The dither is one of places: other orders of rows round each value otherwise."""
    f = scanned
    params, x = arguments(f)
    run = jax.jit(jax.grad(memjax.planned(f, plan=with_codes(f, 0))))
    wanted = jax.jit(jax.grad(f))(params, x)
    rng = np.random.default_rng(3)
    found = [jax.device_get(run(params, rng.permutation(np.asarray(x)))) for _ in range(16)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *found)
    single = np.mean([distance(one, wanted) for one in found])
    assert distance(mean, wanted) < 0.45 * single  # 1 / sqrt(16) = 0.25 where there is no bias


@pytest.mark.parametrize("size", [1e-30, 1e10])
def test_finite_inputs_of_any_size_give_finite_gradients(size):
    params, x = arguments(unrolled)
    x = np.array(x)
    x[:, ::7] *= size
    x[3] = 0
    with_rows = jax.jit(jax.grad(memjax.planned(unrolled, plan=with_codes(unrolled)), (0, 1)))
    expected = jax.jit(jax.grad(unrolled, (0, 1)))(params, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(with_rows(params, x)))


def test_a_plan_of_codes_as_json_and_as_text():
    plan = with_codes(unrolled)
    assert memjax.Plan.from_json(plan.to_json()) == plan
    assert ", in 8 bits" in str(plan)
    assert all(kept.bits == 8 for kept in coded(plan))
    values = HIDDEN * ROWS
    assert any(values < kept.nbytes < 1.05 * values for kept in coded(plan))


def test_without_need_nothing_is_in_codes_and_without_leave_neither():
    args = arguments(unrolled)
    exact, both = (memjax.plan(unrolled, *args, budget="1GiB", allow=allow) for allow in (("recompute",), BOTH))
    assert both.stretches == exact.stretches
    assert not coded(memjax.plan(unrolled, *args, budget="min"))


def test_what_agrees_with_a_log_sum_exp_stays_exact():
    """Queries, keys, values and outputs of attention: none of their codes is among the options."""
    params, x = arguments(transformed)
    found = chain(transformed, params, x, compress=True, device="H200")
    codes, program = found.codes, found.derivative.forward
    heads = [out for eqn in program.eqns for out in eqn.outvars if out.aval.shape == (*transformer.TOKENS, 2, 64)]
    read = {
        var
        for eqn in found.derivative.backward.eqns
        for var in eqn.invars
        if not isinstance(var, jax.extend.core.Literal)
    }
    assert any(var in read for var in heads)
    assert all(codes.nbytes(var) is None for var in heads if var in read)
    hidden = [out for eqn in program.eqns if eqn.primitive.name == "dot_general" for out in eqn.outvars]
    assert any(codes.nbytes(var) for var in hidden if var.aval.shape[-1] == transformer.HIDDEN)


def test_under_vmap():
    params, x = arguments(unrolled)
    gradient = jax.grad(memjax.planned(unrolled, plan=with_codes(unrolled)), (0, 1))
    two = np.stack([x, 0.5 * np.asarray(x)])
    found, wanted = (jax.jit(jax.vmap(f, (None, 0)))(params, two) for f in (gradient, jax.grad(unrolled, (0, 1))))
    assert 1e-5 < distance(found, wanted) < 0.01


def test_a_second_derivative_is_refused():
    params, x = arguments(unrolled)
    gradient = jax.grad(memjax.planned(unrolled, plan=with_codes(unrolled)), (0, 1))
    with pytest.raises(TypeError, match=r"first derivatives|forward"):
        jax.grad(lambda params: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient(params, x))))(params)
