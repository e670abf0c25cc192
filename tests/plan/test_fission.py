"""Loops over the steps of a chunk, divided into what turns wait for and what runs for all of them at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

import memjax
from memjax._core.program.jaxpr import as_closed, bind, calls_in_place, evaluate_in, read
from memjax._plan.tile import fission
from memjax._plan.tile.fission import divided
from tests.plan.test_chunks import ALLOW, data, head, one_loop, parameters

TURNS, BATCH, WIDTH = 6, 3, 4

pytestmark = pytest.mark.usefixtures("x64")


def weights(*shapes, dtype=float):
    rng = np.random.default_rng(3)
    return [jax.device_put(np.asarray(rng.normal(size=shape) / 2, dtype)) for shape in shapes]


def gru(p, h, x):
    of_x, of_h = (jnp.split(a, 3, -1) for a in (x @ p[0] + p[2], h @ p[1]))
    r, z = (jax.nn.sigmoid(of_x[i] + of_h[i]) for i in range(2))
    h = (1 - z) * jnp.tanh(of_x[2] + r * of_h[2]) + z * h
    return h, h


def lstm(p, state, x):
    h, c = state
    i, f, g, o = jnp.split(x @ p[0] + h @ p[1] + p[2], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), (h, c > 0)


def with_everything(p, state, x):
    """Sums of products, of small and of whole numbers, what is carried as it is, and outputs that are the same in all turns."""
    h, total, count, squares, same, biases = state
    new = jnp.tanh(h @ p[1][:, :WIDTH] + x @ p[0][:, :WIDTH])
    state = new, total + (x.T @ new).T, 1 + count, (h * h).sum(0) + squares, same, biases + p[2]
    return state, (h, jnp.float32(2), same, p[2], new @ p[0], x)


def recurrent(step, gates, start, dtype=float):
    p = weights((WIDTH, gates * WIDTH), (WIDTH, gates * WIDTH), (gates * WIDTH,), dtype=dtype)
    [xs] = weights((TURNS, BATCH, WIDTH), dtype=dtype)
    return functools.partial(step, p), start, xs


def loop_in(f, *args):
    """The loop of a function, as an equation, and its operands."""
    program = calls_in_place(jax.make_jaxpr(f)(*args), differentiable=False)
    env = program.given(jax.tree.leaves(args))
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            return eqn, read(env, eqn.invars)
        evaluate_in([eqn], env)
    raise AssertionError("no loop")


def products_in(closed):
    return sum(eqn.primitive.name == "dot_general" for eqn in calls_in_place(closed, differentiable=False).eqns)


def inner_loop(run, values):
    """The body of the loop that is left."""
    loop, _ = loop_in(lambda *values: run(list(values)), *values)
    return as_closed(loop.params["jaxpr"])


def case(name):
    zeros, square = jnp.zeros((BATCH, WIDTH)), jnp.ones((WIDTH, WIDTH))
    states = zeros, square, jnp.int32(4), jnp.ones(WIDTH), jnp.arange(3), jnp.zeros(WIDTH)
    return {
        "gru": lambda: recurrent(gru, 3, zeros + 0.5),
        "lstm": lambda: recurrent(lstm, 4, (zeros, zeros + 1)),
        "everything": lambda: recurrent(with_everything, 1, states),
    }[name]()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["gru", "lstm", "everything"])
def test_results_are_those_of_the_loop(name, reverse):
    step, start, xs = case(name)
    loop, values = loop_in(lambda start, xs: lax.scan(step, start, xs, reverse=reverse), start, xs)
    run = divided(loop, "gpu")
    assert run is not None
    wanted, found = bind(loop, values), run(values)
    assert [(a.shape, a.dtype) for a in found] == [(b.shape, b.dtype) for b in wanted]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    assert products_in(inner_loop(run, values)) == 1


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_runs_for_another_number_of_turns(turns):
    step, start, xs = case("gru")
    loop, values = loop_in(lambda start, xs: lax.scan(step, start, xs), start, xs)
    found = divided(loop, "gpu")([*values[:-1], values[-1][:turns]])
    end, ys = lax.scan(step, start, xs[:turns])
    np.testing.assert_allclose(found[0], end, rtol=1e-12)
    np.testing.assert_allclose(found[1], ys, rtol=1e-12)


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_one_product_is_left_in_the_loop_of_the_backward_pass(name):
    """Those that make gradients of weights and of inputs run for all turns at once."""
    step, start, xs = case(name)
    p = step.args[0]
    loss = lambda p, xs: sum(
        jnp.sum(a**2) for a in jax.tree.leaves(lax.scan(functools.partial(step.func, p), start, xs)[0])
    )
    program = calls_in_place(jax.make_jaxpr(jax.grad(loss, (0, 1)))(p, xs), differentiable=False)
    env = program.given([*p, xs])
    products = []
    for eqn in program.eqns:
        if eqn.primitive.name != "scan":
            evaluate_in([eqn], env)
            continue
        values = read(env, eqn.invars)
        run = divided(eqn, "gpu")
        env |= zip(eqn.outvars, run(values), strict=True)
        products.append((products_in(as_closed(eqn.params["jaxpr"])), products_in(inner_loop(run, values))))
    assert products == [(2, 1), (4, 1)]
    wanted = jax.tree.leaves(jax.grad(loss, (0, 1))(p, xs))
    for a, b in zip(read(env, program.outvars), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_sums_of_narrow_products_keep_the_precision_of_the_sum():
    """A turn adds a product in bfloat16 to a sum in float32: no turn is lost in a larger sum, and the sum is not rounded."""
    a, w = weights((64, 4, 4), (4, 4), dtype=jnp.bfloat16)

    def step(state, a):
        h, total = state
        return (jnp.tanh(h @ w), total + (a @ a).astype(jnp.float32)), None

    start = jnp.zeros((2, 4), jnp.bfloat16), jnp.full((4, 4), 100, jnp.float32)
    loop, values = loop_in(lambda start, a: lax.scan(step, start, a), start, a)
    found = divided(loop, "gpu")(values)[1]
    wide = np.asarray(a, np.float64)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 100 + (wide @ wide).sum(0), rtol=1e-5)


def no_product_follows_from_the_state(s, x):
    """Linear attention: the state is larger than what goes into a turn."""
    return s + x[:, :, None] * x[:, None, :], jnp.einsum("bi,bij->bj", x, s)


def weights_of_each_turn(h, x):
    """A loop over layers."""
    w = jnp.concatenate([x, x[:1]])
    h = jnp.tanh(h @ w)
    return h, (h, x @ w)


def nothing_to_divide(h, x):
    h = jnp.tanh(h @ jnp.ones((WIDTH, WIDTH)) + x)
    return h, h


def with_a_gather(h, x):
    h = jnp.tanh(h @ jnp.ones((WIDTH, WIDTH)) + x)
    return h, (jnp.arange(5.0)[jnp.argmax(h)] * (x @ x.T), h)


def with_an_effect(h, x):
    jax.debug.print("{}", h[0, 0])
    h = jnp.tanh(h @ jnp.ones((WIDTH, WIDTH)) + x @ jnp.ones((WIDTH, WIDTH)))
    return h, h


@pytest.mark.parametrize(
    ("step", "start"),
    [
        (no_product_follows_from_the_state, (BATCH, WIDTH, WIDTH)),
        (weights_of_each_turn, (BATCH, WIDTH)),
        (nothing_to_divide, (BATCH, WIDTH)),
        (with_a_gather, (BATCH, WIDTH)),
        (with_an_effect, (BATCH, WIDTH)),
    ],
)
def test_other_loops_stay_as_they_are(step, start):
    [xs] = weights((TURNS, BATCH, WIDTH))
    loop, _ = loop_in(lambda start, xs: lax.scan(step, start, xs), jnp.zeros(start), xs)
    assert divided(loop, "gpu") is None


def test_loops_in_a_shard_map_stay_as_they_are():
    step, _, xs = case("gru")
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P(None, "batch")
    run = jax.shard_map(lambda xs: lax.scan(step, xs[0], xs)[1], mesh=mesh, in_specs=spec, out_specs=spec)
    [inside] = jax.make_jaxpr(run)(xs).jaxpr.eqns
    [loop] = [eqn for eqn in inside.params["jaxpr"].eqns if eqn.primitive.name == "scan"]
    assert divided(loop, "gpu") is None


def test_nothing_is_divided_on_a_cpu():
    step, start, xs = case("gru")
    loop, _ = loop_in(lambda start, xs: lax.scan(step, start, xs), start, xs)
    assert divided(loop, "cpu") is None


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(fission, "GPUS", ("cpu",))


def recurrent_policy(p, x, labels):
    """A GRU between an embedding and a head, and a second loop that reads what the first makes."""
    first = jnp.concatenate([p["in"], p["loop"], p["second"]], 1), jnp.concatenate([p["loop"]] * 3, 1), jnp.zeros(24)
    start = jnp.ones((x.shape[1], 8))
    _, h = lax.scan(functools.partial(gru, first), start, jax.nn.relu(x @ p["embed"]))
    _, h = lax.scan(functools.partial(gru, first), start, h)
    return head(p, h, labels).mean()


def loops_of(jaxpr):
    """The bodies of the innermost loops."""
    for eqn in jaxpr.eqns:
        inside = [body for value in eqn.params.values() for body in bodies(value)]
        for body in inside:
            yield from loops_of(body)
        if eqn.primitive.name == "scan" and not any(True for body in inside for _ in loops_of(body)):
            yield from inside


def bodies(value):
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        return [getattr(value, "jaxpr", value)]
    return [body for one in value for body in bodies(one)] if isinstance(value, tuple | list) else []


def equal(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, wanted)


def has_one_product_a_turn(jaxpr):
    """In each loop over steps."""
    return {sum(eqn.primitive.name == "dot_general" for eqn in body.eqns) for body in loops_of(jaxpr)} == {1}


def test_gradients_of_plans_in_chunks(as_on_a_gpu):
    """Exact in float64, with a last chunk that is shorter. Each loop over steps has one product a turn, in both passes."""
    f, args = functools.partial(one_loop, reverse=True), (parameters(), *data(150, 4))
    plain = jax.jit(jax.value_and_grad(f))
    plan = memjax.plan(f, *args, budget=memjax.measure(plain, *args).temp_bytes // 6, allow=ALLOW)
    [chunks] = plan.tiled
    assert "a loop over time" in chunks.what
    assert chunks.length % chunks.tile
    step = jax.value_and_grad(memjax.planned(f, plan=plan))
    equal(jax.jit(step)(*args), plain(*args))
    assert has_one_product_a_turn(jax.make_jaxpr(step)(*args).jaxpr)


def test_gradients_of_steps_in_chunks(as_on_a_gpu):
    f = recurrent_policy
    args = parameters(), *data(300, 4)
    plain = jax.jit(jax.value_and_grad(f))
    measured = memjax.measure(plain, *args)
    beside = measured.argument_bytes + measured.output_bytes
    step = memjax.jit(jax.value_and_grad(f), budget=beside + measured.temp_bytes // 4, allow=ALLOW)
    assert "a loop over time" in str(step.plan(*args))
    equal(step(*args), plain(*args))
    assert has_one_product_a_turn(step.trace(*args).jaxpr.jaxpr)
