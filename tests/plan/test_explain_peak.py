"""A plan's predicted peak beside the compiled one: each array on its side, and sums that are the plan's own figures."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import memjax
from memjax._core.program.working import fullest_moment
from memjax._explain.compared import compared
from memjax._explain.parts import Alive
from memjax._plan.derivative import Derivative
from memjax._plan.memory.layout import Layout
from memjax._plan.predicted import _in, alive_by
from memjax._plan.solve.chain import Chain, peak_of
from memjax._plan.solve.subsets import Subset
from tests.plan.networks import inputs, parameters, scanned_loss, stacked, unrolled_loss
from tests.plan.test_bytes import H200

KIB = 1024


def attention(w, x):
    y = jnp.tanh(x @ w["in"])
    heads = y.reshape(256, 8, 16)
    return jnp.mean(jnp.sin(jnp.einsum("thd,shd->hts", heads, heads))) + jnp.mean(jnp.sin(y @ w["out"]))


def of_kind(comparison, made_by, kind):
    [row] = [one for one in comparison.rows if one.name.startswith(made_by) and one.type == kind]
    return row


def test_an_array_that_the_compiler_keeps_twice_is_there_once_more():
    """The product of heads needs them in another order, of which the model knows nothing."""
    w = {"in": jnp.full((64, 128), 0.01), "out": jnp.full((128, 64), 0.01)}
    x = jnp.ones((256, 64))
    plan = memjax.plan(attention, w, x, budget="100MiB")
    found = memjax.explain_peak(attention, w, x, plan=plan)
    kept = of_kind(found, "tanh test_explain_peak.py", "float32[256,128]")
    assert (kept.predicted, kept.compiled, kept.counts) == (128 * KIB, 128 * KIB, (1, 1))
    again = of_kind(found, "reshape test_explain_peak.py", "float32[8,256,16]")
    assert (again.predicted, again.compiled, again.counts) == (0, 128 * KIB, (0, 1))
    assert found.compiled_alone >= 128 * KIB
    assert found.compiled == plan.compiled_nbytes
    assert "x0 and x1" in str(found)


def recurrent(w, xs):
    return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((8, 32)), xs)[0] ** 2)


LAYERS = parameters(jnp.float32), inputs(jnp.float32)
IN_LOOP = stacked(LAYERS[0]), LAYERS[1]
STEPS = jnp.eye(32) / 2, jnp.ones((40, 8, 32))
HEAD = jnp.full((32, 4096), 0.01), LAYERS[1]


def head(w, x):
    return jnp.mean(jax.nn.logsumexp(x @ w, -1))


CASES = [(unrolled_loss, LAYERS), (scanned_loss, IN_LOOP), (recurrent, STEPS), (head, HEAD)]


@pytest.mark.parametrize(("f", "args"), CASES, ids=["unrolled", "in a loop", "blocks of turns", "tiles"])
def test_sums_are_those_of_the_plan(f, args):
    plan = memjax.plan(f, *args, budget="min", allow=("recompute", "tile") if f is head else ("recompute",))
    assert any(stretch.in_blocks for stretch in plan.stretches) == (f is recurrent)
    assert bool(plan.tiled) == (f is head)
    found = memjax.explain_peak(f, *args, plan=memjax.Plan.from_json(plan.to_json()))
    assert found.predicted == sum(row.predicted for row in found.rows) == plan.first_nbytes
    assert found.compiled == sum(row.compiled for row in found.rows) == plan.compiled_nbytes
    sizes = [max(row.predicted, row.compiled) for row in found.rows]
    assert sizes == sorted(sizes, reverse=True)


LARGE = (
    jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), IN_LOOP[0]),
    jax.ShapeDtypeStruct((2**17, 32), jnp.float32),
)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("f", "args"), [*CASES[:3], (scanned_loss, LARGE)], ids=["unrolled", "in a loop", "blocks", "to the host"]
)
def test_what_is_predicted_of_a_gpu_adds_up(f, args, compress):
    """What is lent by results, carried in them, on the host, in codes and in loops of two parts counts as in the model."""
    closed = jax.make_jaxpr(f)(*args)
    wrt = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in closed.in_avals]
    derivative = Derivative(closed, closed.in_avals, wrt, [True], {})
    chain = Chain(derivative, H200, compress=compress, offload=True)
    for nbytes, _ in chain.frontier:
        way = chain.choices(nbytes)
        assert sum(one.bytes for one in alive_by(chain, way, Layout(()))) == peak_of(way)


def test_what_is_written_over_an_operand_takes_its_bytes():
    def widened(x, w):
        return (x @ w).astype(jnp.float32)

    half = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(widened)(half, half).jaxpr
    moment = fullest_moment(jaxpr.eqns, jaxpr.invars, [], jaxpr.outvars, [], "cpu")
    assert moment.at == 1
    assert moment.over == 2 * 64 * 64
    assert sum(one.nbytes for one in _in(moment, Subset([], []))) == moment.nbytes == 4 * 64 * 64


def test_a_step_has_its_arguments_and_the_update_beside():
    def train_step(params, momentum, x):
        grads = jax.grad(unrolled_loss)(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    params, x = LAYERS
    step = memjax.jit(train_step, donate_argnums=(0, 1), budget="70%", allow=("recompute",))
    args = params, jax.tree.map(jnp.zeros_like, params), x
    plan, found = step.plan(*args), step.explain_peak(*args)
    assert not plan.as_written
    assert found.compiled == sum(row.compiled for row in found.rows) == plan.nbytes
    [held] = [row for row in found.rows if row.name == "arguments"]
    assert held.predicted == held.compiled == sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    [part] = plan.passes
    assert found.predicted == part.first_nbytes + held.predicted
    assert memjax.jit(train_step).explain_peak(*args).compiled > found.compiled


@pytest.mark.parametrize("donated", [(), (0,)])
def test_what_is_kept_lies_in_new_parameters_unless_these_lie_in_donated_ones(donated):
    def train_step(params, x):
        def loss(params):
            h = x
            for w in params:
                h = jnp.tanh(jnp.tanh(h @ w) @ w.T)
            return jnp.sum(h**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    args = [jnp.eye(64) for _ in range(8)], jnp.ones((64, 64))
    found = memjax.jit(train_step, budget="min", allow=("recompute",), donate_argnums=donated).explain_peak(*args)
    assert found.predicted == pytest.approx(found.compiled, rel=0.03)


def test_layers_that_differ_in_numbers_are_one_row():
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return jnp.tanh(linen.Dense(64)(x))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            for index in range(3):
                x = Layer(name=f"layers_{index}")(x)
            return jnp.mean(x**2)

    x = jnp.ones((512, 64))
    params = jax.jit(Model().init)(jax.random.key(0), x)
    plan = memjax.plan(Model().apply, params, x, budget="1GiB")
    found = memjax.explain_peak(Model().apply, params, x, plan=plan)
    row = of_kind(found, "tanh Model/layers[0..", "float32[512,64]")
    assert min(row.counts) > 1


def test_an_array_is_paired_with_the_surest_first():
    product, copy = (
        Alive("dot m.py:1", "m.py:1", "float32[8]", 32),
        Alive("copy of dot m.py:1", "m.py:1", "float32[8]", 32),
    )
    other, unplaced = Alive("sin m.py:2", "m.py:2", "float32[8]", 32), Alive("fusion", "", "float32[8]", 32)
    found = compared([product, other], [copy, unplaced, product])
    by_name = {row.name: row.counts for row in found.rows}
    assert by_name == {"dot m.py:1": (1, 1), "copy of dot m.py:1": (0, 1), "sin m.py:2": (1, 1)}
    assert (found.predicted_alone, found.compiled_alone) == (0, 32)


def test_a_plan_of_another_function_is_refused():
    plan = memjax.plan(unrolled_loss, *LAYERS, budget="10MiB")
    with pytest.raises(ValueError, match="plan must be of the function"):
        memjax.explain_peak(unrolled_loss, LAYERS[0][1:], LAYERS[1], plan=plan)
    with pytest.raises(TypeError, match="plan must be a Plan"):
        memjax.explain_peak(unrolled_loss, *LAYERS, plan=plan.to_json())
