"""Plans on meshes: one for every way in which a step gets its shardings, and bytes that are those of a device."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax


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
    normal = lambda i, *shape: 0.2 * np.asarray(jax.random.normal(jax.random.key(i), shape))
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


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_serves_every_way_in_which_a_step_gets_its_shardings(plan_ahead, way):
    jitted, context = WAYS[way]
    f = jax.grad(memjax.planned(loss, plan=plan_ahead))
    with context():
        got = jitted(f, (NamedSharding(mesh(), P()), NamedSharding(mesh(), P("d"))))(*arguments())
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    jax.tree.map(same, jax.device_get(got), jax.jit(jax.grad(loss))(*arguments()))
