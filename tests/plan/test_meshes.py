"""Plans on meshes: one for every way in which a step gets its shardings, and bytes that are those of a device."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from memjax._plan.memory.layout import layout_of


def mesh(name="d", kind=AxisType.Auto):
    return jax.make_mesh((8,), (name,), axis_types=(kind,))


def loss(ws, x):
    """Layers, and a loop of layers, with a constraint that names no mesh of the arguments."""
    for w in ws[0]:
        x = x + jnp.tanh(x @ w) @ w.T
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh("other"), P("other")))
    x, _ = jax.lax.scan(lambda x, w: (jax.nn.sigmoid(x @ w) * x, None), x, ws[1])
    return jnp.mean(jnp.abs(x) ** 2)


def arguments():
    normal = lambda i, *shape: (0.2 * np.random.default_rng(i).normal(size=shape)).astype(np.float32)
    return [[normal(i, 16, 32) for i in range(3)], normal(5, 3, 16, 16)], normal(9, 64, 16)


WAYS = {
    "in_shardings": (lambda f, shardings: jax.jit(f, in_shardings=shardings), contextlib.nullcontext),
    "placed": (lambda f, shardings: lambda *args: jax.jit(f)(*jax.device_put(args, shardings)), contextlib.nullcontext),
    "outside of jit": (lambda f, shardings: lambda *args: f(*jax.device_put(args, shardings)), contextlib.nullcontext),
    "set_mesh": (
        lambda f, shardings: lambda *args: jax.jit(f)(*jax.device_put(args, shardings)),
        lambda: jax.set_mesh(mesh()),
    ),
    "a constraint": (
        lambda f, shardings: jax.jit(lambda ws, x: f(ws, jax.lax.with_sharding_constraint(x, shardings[1]))),
        contextlib.nullcontext,
    ),
    "one device": (lambda f, _: jax.jit(f), contextlib.nullcontext),
}


@pytest.fixture(scope="module")
def plan_ahead():
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments())
    rows = NamedSharding(mesh("elsewhere"), P("elsewhere"))
    whole = NamedSharding(mesh("elsewhere"), P())
    placed = lambda tree, sharding: jax.tree.map(lambda a: a.update(sharding=sharding), tree)
    return memjax.plan(loss, placed(types[0], whole), placed(types[1], rows), budget="min")


@functools.cache
def wanted():
    return jax.device_get(jax.jit(jax.grad(loss))(*arguments()))


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_serves_every_way_in_which_a_step_gets_its_shardings(plan_ahead, way):
    jitted, context = WAYS[way]
    f = jax.grad(memjax.planned(loss, plan=plan_ahead))
    with context():
        got = jitted(f, (NamedSharding(mesh(), P()), NamedSharding(mesh(), P("d"))))(*arguments())
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    jax.tree.map(same, jax.device_get(got), wanted())


def layers(ws, x):
    for w in ws:
        x = x + jnp.tanh(x @ w) @ w.T
    return jnp.mean(x**2)


def put(tree, of, *spec):
    return jax.device_put(tree, NamedSharding(of, P(*spec)))


def layers_on(of, *of_weights, rows=8192):
    normal = lambda i, *shape: np.random.default_rng(i).normal(size=shape).astype(np.float32)
    weights = [np.float32(0.05) * normal(i, 64, 256) for i in range(5)]
    return put(weights, of, *of_weights), put(normal(9, rows, 64), of, "d")


def temp(f, *args, **options):
    return memjax.measure(jax.jit(f, **options), *args).temp_bytes


def sgd(f):
    def step(ws, x):
        value, gradients = jax.value_and_grad(f)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value

    return step


def test_a_budget_under_jit_is_that_of_a_device_and_says_what_it_assumes():
    args = layers_on(mesh(), "d")
    budget = int(0.6 * temp(jax.value_and_grad(layers), *args))
    planned = memjax.planned(layers, budget=budget)
    with pytest.warns(UserWarning, match=r"split evenly over the 8 devices.*memjax\.plan\(f, \*args"):
        assert 0.8 * budget < temp(sgd(planned), *args, donate_argnums=0) <= budget
    with pytest.raises(ValueError, match="split evenly over the 8 devices"):
        jax.jit(jax.grad(memjax.planned(layers, budget=1000)))(*args)


def test_an_axis_that_a_loop_slices_is_the_last_that_is_taken_to_be_split():
    found = []

    def traced(ws, x):
        rows = lambda x, w: (jnp.tanh(x @ w), None)
        closed = jax.make_jaxpr(lambda ws, x: jax.lax.scan(rows, x, ws)[0])(ws, x)
        found.append(layout_of(closed, [ws, x], [True, True]))
        return x

    with jax.set_mesh(mesh()):
        jax.jit(traced).trace(jnp.ones((8, 16, 16)), jnp.ones((16, 16)))
    assert [one.spec for one in found[0].shardings] == [P(None, "d"), P("d")]


def test_explicit_axes_tell_shardings_under_jit():
    of = mesh(kind=AxisType.Explicit)
    with jax.set_mesh(of):
        args = layers_on(of)
        budget = int(0.6 * temp(jax.value_and_grad(layers), *args))
        ahead = memjax.plan(layers, *args, budget=budget)
        for planned in (memjax.planned(layers, budget=budget), memjax.planned(layers, plan=ahead)):
            assert temp(jax.value_and_grad(planned), *args) == ahead.compiled_nbytes <= budget


def test_without_a_mesh_a_budget_under_jit_is_that_of_one_device_and_says_so():
    args = jax.tree.map(np.asarray, layers_on(mesh()))
    with pytest.raises(ValueError, match="holds if all arguments are on one device"):
        jax.jit(jax.grad(memjax.planned(layers, budget="1MiB")))(*args)


@pytest.mark.parametrize("of_weights", [(), ("d",)], ids=["whole parameters", "sharded parameters"])
def test_a_plan_ahead_has_the_bytes_of_a_device_in_a_whole_step(of_weights):
    args = layers_on(mesh(), *of_weights)
    budget = int(0.6 * temp(sgd(layers), *args, donate_argnums=0))
    plan = memjax.plan(layers, *args, budget=budget)
    taken = temp(sgd(memjax.planned(layers, plan=plan)), *args, donate_argnums=0)
    gradients = 0 if of_weights else sum(w.nbytes for w in args[0])  # whole, they are results for a plan
    assert 0.8 * budget < taken <= 1.01 * budget + gradients
    assert 0.7 < plan.first_nbytes / plan.compiled_nbytes < 1.4
    assert all(0.3 * plan.nbytes < point.nbytes for point in plan.frontier())
    assert all(one.nbytes <= 8192 * 256 * 4 / 8 for stretch in plan.stretches for one in stretch.kept)
    assert "gradients are sharded" in plan.assumes
    assert plan.assumes in str(plan)
    assert memjax.Plan.from_json(plan.to_json()) == plan


def test_a_chain_counts_the_bytes_of_a_device():
    ws, x = layers_on(mesh())
    blocks = [lambda w, x: x + jnp.tanh(x @ w) @ w.T] * len(ws)
    one = memjax.remat.chain_plan(blocks, jax.tree.map(np.asarray, ws), np.asarray(x), budget="min")
    of_mesh = memjax.remat.chain_plan(blocks, ws, x, budget="min")
    assert type(of_mesh) is type(one)
    assert of_mesh.nbytes < 1.3 * one.nbytes / 8


def test_a_plan_gathers_parameters_again_wherever_it_is_used():
    """Under `jax.jit` nothing tells that they are sharded: the plan does."""

    def feed_forwards(ws, x):
        for w, v in ws:
            x = x + jax.nn.gelu(x / (1 + jnp.mean(x**2, -1, keepdims=True)) @ w) @ v
        return jnp.mean(x**2)

    rows = NamedSharding(mesh(), P("d"))
    sharded = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
    args = [(sharded(64, 256), sharded(256, 64)) for _ in range(3)], sharded(1024, 64)
    plan = memjax.plan(feed_forwards, *args, budget="1.45MiB")
    assert plan.gathers_again
    step = jax.value_and_grad(memjax.planned(feed_forwards, plan=plan))
    untold = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    jitted = jax.jit(step, in_shardings=rows, out_shardings=(None, rows))
    compiled = jitted.lower(*untold).compile(memjax.remat_compiler_options())
    assert compiled.memory_analysis().temp_size_in_bytes == plan.compiled_nbytes <= plan.budget
