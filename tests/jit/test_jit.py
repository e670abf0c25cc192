"""`memjax.jit`: what is compiled holds no more than the budget and computes what `jax.jit` does."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import memjax
from memjax._core.check import readable_bytes
from memjax._jit.account import bytes_of_results
from memjax._plan.solve import chain
from tests.jit.steps import OPTIONS, STEPS, WIDTH, batch, held, loss, parameters, within


def copied(tree):
    copy = functools.partial(jax.device_put, may_alias=False)
    return jax.tree.map(lambda leaf: copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def close(found, expected, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(np.max(np.abs(b), initial=0), 1e-6))


@pytest.mark.parametrize("name", [pytest.param("layers", marks=pytest.mark.smoke), *list(STEPS)[1:]])
def test_keeps_the_budget_and_the_results(name):
    step = STEPS[name]()
    budget = within(step.share, step)
    jitted = memjax.jit(step.f, budget=budget, **step.options)
    plan = jitted.plan(*step.args)
    compiled = jitted.lower(*step.args).compile()
    assert plan.nbytes == held(compiled) <= budget < plan.plain_nbytes
    found, expected = (f(*copied(step.args)) for f in (jitted, jax.jit(step.f, **step.options)))
    close(found, expected)
    same = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert all(jax.tree.leaves(jax.tree.map(same, found, expected)))


def test_each_budget_costs_what_the_frontier_predicts(count):
    step = STEPS["layers"]()
    jitted = memjax.jit(step.f, **step.options)
    count.clear()
    points = jitted.frontier(*step.args)
    assert not count
    assert all(a.nbytes < b.nbytes and a.seconds > b.seconds for a, b in itertools.pairwise(points))
    assert points[-1].nbytes == pytest.approx(jitted.plan(*step.args).nbytes, rel=0.1)
    point = points[len(points) // 2]
    plan = jitted.asking(budget=point.nbytes).plan(*step.args)
    assert plan.nbytes <= point.nbytes
    assert plan.microbatches == pytest.approx(point.microbatches, rel=1)


def test_what_fits_is_the_program_of_jax_jit(count):
    step = STEPS["layers"]()
    plain = jax.jit(step.f, **step.options)
    for budget in ("1GiB", "device"):  # a CPU tells no limit
        jitted = memjax.jit(step.f, budget=budget, **step.options)
        assert jitted.lower(*step.args).as_text() == plain.lower(*step.args).as_text()
        assert jitted.plan(*step.args).as_written
        jitted(*copied(step.args))
    assert len(count) == 2
    no_gradient = memjax.jit(lambda x: jnp.sin(x) + 1, budget="min")
    close(no_gradient(jnp.ones(3)), jnp.sin(1.0) + jnp.ones(3))


def test_many_derivatives_take_few_compilations_and_have_their_least(count):
    step = STEPS["an attack before the gradient"]()
    budget = within(0.7, step)
    plans = {}
    for asked, most in ((budget, 4), ("min", 5)):
        count.clear()
        plans[asked] = plan = memjax.jit(step.f, budget=asked, **step.options).plan(*step.args)
        assert len(plan.passes) == 4
        assert len(count) <= most
        assert plan.nbytes <= budget
    least = plans["min"].nbytes
    assert memjax.jit(step.f, budget=least, **step.options).plan(*step.args).nbytes <= least


def test_the_least_is_no_more_than_the_step_takes_as_it_is_written():
    """Parameters outweigh what is kept: whatever is computed again takes more memory."""

    def step(params, x):
        network = lambda params, x: jnp.sum(jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]))
        for _ in range(3):
            x = x + 0.1 * jax.grad(network, 1)(params, x)
        return jax.grad(network)(params, x)

    args = [jnp.eye(128)] * 2, jnp.ones((8, 128))
    plain = held(jax.jit(step).lower(*args).compile())
    assert memjax.jit(step, budget="min").plan(*args).nbytes <= plain
    with pytest.raises(ValueError, match="but the least possible is") as refused:
        memjax.jit(step, budget="261KiB", allow=("recompute",)).plan(*args)  # arguments and results take 260
    said = readable_bytes(plain, up=True)
    assert (
        f"the least possible is {said} of a device, at 1.00 of the predicted time; as it is written it takes {said}"
        in str(refused.value)
    )


def test_other_settings_are_another_program(count):
    jitted = memjax.jit(lambda x: jnp.sin(x) @ x)
    settings = [
        jax.default_matmul_precision("highest"),
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.default_device(jax.devices()[1]),
    ]
    x = np.ones((3, 3), np.float32)
    jitted(x)
    for number, one in enumerate(settings, 2):
        with one:
            jitted(x)
        jitted(x)
        assert len(count) == number


def test_callbacks_stay_in_their_order():
    seen = []

    def half(value):
        seen.append(float(value))
        return np.float32(0.5)

    def step(params, x):
        called = lambda value: io_callback(half, jax.ShapeDtypeStruct((), jnp.float32), value, ordered=True)
        rate = called(3.0)  # read after the gradients alone
        value, gradients = jax.value_and_grad(loss)(params, x)
        norm = sum(jnp.sum(g**2) for g in gradients)
        for one in (norm, value):
            called(one)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients)

    args = parameters()[:2], batch()
    jitted = memjax.jit(step, budget="80%")
    assert not jitted.plan(*args).as_written
    close(jax.block_until_ready(jitted(*args)), jax.tree.map(lambda p, g: p - 0.5 * g, args[0], jax.grad(loss)(*args)))
    value, gradients = jax.value_and_grad(loss)(*args)
    norm = sum(jnp.sum(g**2) for g in gradients)
    np.testing.assert_allclose(seen, [3.0, norm, value], rtol=1e-5)


def test_a_plan_is_kept_for_arguments_of_a_kind_and_acts_elsewhere():
    step = STEPS["a scan over layers"]()
    jitted = memjax.jit(step.f, budget=within(0.6, step), allow=("recompute",), **step.options)
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), step.args)
    ahead = jitted.plan(*types)
    text = ahead.to_json()
    again = memjax.StepPlan.from_json(text)
    assert again == ahead
    assert "as it is written" in str(ahead)
    assert any(ahead.passes)
    assert not dataclasses.replace(ahead, tiled=()).as_written
    acting = memjax.jit(step.f, plan=again, **step.options)
    assert held(acting.lower(*step.args).compile(OPTIONS)) == ahead.nbytes
    params, state, x = copied(step.args)
    for _ in range(2):
        params, state, value = acting(params, state, x)
    twice = copied(step.args)
    for _ in range(2):
        twice = (*jax.jit(step.f)(*twice)[:2], x)
    close(params, twice[0])
    assert value.shape == ()
    other = STEPS["layers"]()
    with pytest.raises(ValueError, match="plan must be of"):
        memjax.jit(other.f, plan=again)(*other.args)
    nothing_again = json.loads(text)
    nothing_again["passes"][0]["stretches"] = []
    unplanned = memjax.jit(step.f, plan=memjax.StepPlan.from_json(json.dumps(nothing_again)), **step.options)
    close(unplanned(*copied(step.args)), jax.jit(step.f)(*step.args))
    assert '"tiled": []' in text
    for damaged in (
        "{}",
        text.replace('"tiled": []', '"tiled": {}'),
        text.replace('"budget": ', '"budget": -'),
        text[:-9],
    ):
        with pytest.raises(ValueError, match="StepPlan"):
            memjax.StepPlan.from_json(damaged)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.unused = nnx.Variable(jnp.arange(3.0))

    def __call__(self, x):
        for one in self.layers:
            x = x + jnp.tanh(nnx.gelu(one(x)))
        return self.dropout(self.norm(x))


def test_nnx_objects_are_updated_in_place():
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    def made():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    ours, theirs = made(), made()
    jitted, plain = memjax.jit(step, budget="80%", donate_argnums=(0, 1)), nnx.jit(step)
    for _ in range(3):
        close(jitted(*ours, batch()), plain(*theirs, batch()))
    no_keys = nnx.Not(nnx.RngState)
    close(nnx.state(ours, no_keys), nnx.state(theirs, no_keys))
    assert ours[0].dropout.rngs.count[...] == 3
    np.testing.assert_array_equal(ours[0].unused[...], jnp.arange(3.0))  # donated, and there still
    plan = jitted.plan(*ours, batch())
    assert held(jitted.lower(*ours, batch()).compile(OPTIONS)) == plan.nbytes <= 0.8 * plan.plain_nbytes


def test_options_and_arguments_are_those_of_jax_jit():
    @memjax.jit(budget="80%", static_argnames="power", donate_argnames="params")
    def step(params, x, *, power=1, **others):
        """Documented."""
        value, gradients = jax.value_and_grad(lambda p: loss(p, x) ** power)(params)
        return jax.tree.map(lambda p, g: p - others["rate"] * g, params, gradients), value

    assert step.__name__ == "step"
    assert step.__doc__ == "Documented."
    params = parameters(2)
    given = copied(params)
    new, value = step(given, batch(), power=2, rate=0.1)
    assert given[0].is_deleted()
    close(value, loss(params, batch()) ** 2)
    assert step(copied(params), batch(), power=1, rate=0.1)[1] != value
    close(step(copied(params), batch(), power=2, rate=0.1)[0], new)
    close(step(copied(params), batch(128), power=2, rate=jnp.float32(0.1))[1], loss(params, batch(128)) ** 2)
    within_jit = jax.jit(lambda params, x: step(params, x, power=2, rate=0.1)[1])
    close(within_jit(params, batch()), value)
    over_tracers = jax.grad(lambda scale: memjax.jit(lambda x: jnp.sum(scale * x), budget="min")(batch()))
    close(over_tracers(2.0), jnp.sum(batch()))
    assert "Kept between the passes" in str(step.explain(params, batch(), power=2, rate=0.1))
    step.clear_cache()
    with pytest.raises(TypeError, match="donate"):
        memjax.jit(loss, donate_arguments=0)


def test_a_method_is_bound_and_arrays_are_closed_over():
    class Trainer:
        rate = 0.1
        x = batch()

        @memjax.jit(budget="80%", static_argnums=0)
        def step(self, params):
            return jax.tree.map(lambda p, g: p - self.rate * g, params, jax.grad(loss)(params, self.x))

    params = parameters(2)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch()))
    close(Trainer().step(params), expected)


def test_a_donated_argument_holds_one_result():
    a, b = jnp.ones((4, 8)), jnp.ones(16)
    traced = jax.jit(lambda a, b: (a + 1, a + 2, b + 1), donate_argnums=0).trace(a, b)
    assert bytes_of_results(traced) == a.nbytes + b.nbytes
    assert bytes_of_results(traced, all_donated=True) == a.nbytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": -1}, "budget must be"),
        ({"budget": "a lot"}, "budget must be"),
        ({"allow": "recompute"}, "allow must be a sequence"),
        ({"allow": ("tiles",)}, "allow must be"),
        ({"plan": 3}, "plan must be a StepPlan"),
        ({"cache_dir": 3}, "cache_dir must be a path"),
        ({"cache_dir": __file__}, "cache_dir must be the path of a folder"),
        ({"static_argnums": "0"}, "static_argnums must be what jax.jit takes, got '0': it says"),
        ({"donate_argnums": 7}, "donate_argnums must be what jax.jit takes, got 7: it says"),
        ({"static_argnums": 0, "donate_argnums": 0}, "options must be what jax.jit takes"),
        ({"compiler_options": "x"}, "compiler_options must be None or a dict"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        memjax.jit(loss, **options)
    with pytest.raises(TypeError, match="f must be a function"):
        memjax.jit(3)


def test_bad_calls():
    with pytest.raises(TypeError, match=r"f must take arguments of .* that raises TypeError: dot_general"):
        memjax.jit(loss)(parameters(), batch()[:, :3])
    with pytest.raises(TypeError, match=r"arguments of a jitted function must be arrays: .* static_argnames"):
        memjax.jit(loss).plan(parameters(), "x")
    with pytest.raises(TypeError, match="argument 1 must be hashable, as it is static, got an array"):
        memjax.jit(loss, static_argnums=1)(parameters(), batch())
    with pytest.raises(
        TypeError, match=r"arguments must be arrays, got the type float32\[3\] of an array: plan, trace"
    ):
        memjax.jit(jnp.sin)(jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(ValueError, match="compiler_options must be options that the compiler knows"):
        memjax.jit(jnp.sin, compiler_options={"nonsense": 1})(1.0)


def test_codes_where_they_are_allowed():
    rng = np.random.default_rng(0)
    ws = [(rng.normal(size=(256, 1024)) / 16, rng.normal(size=(1024, 256)) / 32) for _ in range(2)]
    ws, x = jax.device_put((ws, rng.normal(size=(512, 256))))

    def step(ws, x):
        def loss(ws):
            y = x
            for w, v in ws:
                y = y + jax.nn.gelu(y @ w) @ v
            return jnp.mean(y**2)

        value, gradients = jax.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - g, ws, gradients), value

    exact = memjax.jit(step, budget="18MiB", allow=("recompute",)).plan(ws, x)
    jitted = memjax.jit(step, budget="18MiB", allow=("recompute", "compress"))
    plan = jitted.plan(ws, x)
    assert plan.seconds < exact.seconds
    assert {one.bits for part in plan.passes for stretch in part.stretches for one in stretch.kept} >= {8}
    found, expected = jitted(ws, x), jax.jit(step)(ws, x)
    close(found[1], expected[1])  # values are exact
    close(found[0], expected[0], rtol=1e-3)


def test_layers_are_solved_once_however_many_scalars_their_updates_make(monkeypatch):
    """AdamW of bfloat16 weights makes scalars of its own for each of them, early in the backward pass."""
    solved = []
    options = chain.options
    monkeypatch.setattr(chain, "options", lambda *args, **more: solved.append(1) or options(*args, **more))
    tx = optax.adamw(1e-3)

    def step(weights, state, x):
        def loss(weights):
            residual = lambda x, w: x + jnp.tanh(x @ w)
            return jnp.sum(functools.reduce(residual, weights, x).astype(jnp.float32) ** 2)

        updates, state = tx.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    def count(layers):
        solved.clear()
        weights = [jnp.ones((16, 16), jnp.bfloat16)] * layers
        with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match="the least possible"):
            memjax.jit(step, budget=1000).plan(weights, tx.init(weights), jnp.ones((64, 16), jnp.bfloat16))
        return len(solved)

    assert count(7) == count(9) > 0


def test_arguments_may_have_parts_that_are_none_or_not_read():
    """As the static parts of a module of equinox, or a state that a step ignores."""

    def step(state, x):
        return {**state, "w": state["w"] - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(state["w"])}

    args = {"w": jnp.ones((64, 64)), "none": None, "ignored": jnp.ones(3)}, jnp.ones((256, 64))
    jitted = memjax.jit(step, budget="1GiB")
    assert jitted(*args)["none"] is None
    assert jitted.plan(*args).nbytes > 0
