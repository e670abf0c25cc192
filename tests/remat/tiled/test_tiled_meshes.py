"""`tiled` of arrays on a mesh: every device computes its own positions, in its share of the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from memjax._core.segments import segments, whole
from memjax.remat import tiled

X, W = np.linspace(-1, 1, 8 * 512 * 16, dtype=np.float32).reshape(8, 512, 16), np.eye(16, 64, dtype=np.float32)


def layer(x, w):
    return x + jnp.tanh(x @ w) @ w.T


def gradients(f):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))


def exact_gradients(length):
    """The gradient of `layer`, computed by hand in float64: a sum of 4,096 float32 numbers is off by 1e-3 on some CPUs."""
    x, w = X[:, :length].astype(np.float64), W.astype(np.float64)
    h = np.tanh(x @ w)
    of_y = np.cos(x + h @ w.T)
    of_product = (of_y @ w) * (1 - h**2)
    return of_y + of_product @ w.T, np.einsum("bti,btj->ij", x, of_product) + np.einsum("bti,btj->ij", of_y, h)


def compiled(f, devices, kind, spec):
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(kind,), devices=jax.devices()[:devices])
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((X, spec), (W, P()))]
    return jax.jit(f).lower(*args).compile(memjax.remat_compiler_options()), args


def cost(program):
    found = program.cost_analysis()
    flops = (found[0] if isinstance(found, list) else found)["flops"]
    return flops, program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("d"), P(None, "d")], ids=["examples", "positions"])
def test_a_device_has_its_share_of_work_and_bytes(kind, spec):
    f = gradients(tiled(layer, (1, None), 1, tile=64))
    program, args = compiled(f, 8, kind, spec)
    flops, temp = cost(program)
    flops_of_one, temp_of_one = cost(compiled(f, 1, AxisType.Auto, P())[0])
    assert flops < 1.1 * flops_of_one / 8
    assert temp < 1.3 * temp_of_one / 8
    for found, expected in zip(program(*args), exact_gradients(512), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("length", "tile"), [(16, 3), (24, 16), (12, 5), (13, 4), (4, 100)])
def test_any_length_and_tile_on_automatic_axes(length, tile):
    mesh = jax.make_mesh((2, 4), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
    spec = P("d", "t") if length % 4 == 0 else P("d")
    x = jax.device_put(X[:, :length], NamedSharding(mesh, spec))
    found = jax.jit(gradients(tiled(layer, (1, None), 1, tile=tile)))(x, W)
    for one, expected in zip(found, exact_gradients(length), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-4)


def test_segments_are_those_of_the_axis_that_is_cut():
    mesh = jax.make_mesh((2, 4), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(X[..., :8], NamedSharding(mesh, P("d", None, "t")))
    found = [segments(length, [x], [axis], 7) for axis, length in enumerate(x.shape)]
    assert [(one.length, one.count, tile) for one, tile in found] == [(8, 2, 6), (512, 1, 7), (8, 4, 4)]
    assert [jax.typeof(whole(x, axis)).sharding.spec for axis in (0, 2)] == [P(None, None, "t"), P("d", None, None)]
