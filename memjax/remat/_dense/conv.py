"""The convolutions of a dense layer, and the gradient of the 3x3 one in a form that every backend runs fast inside loops."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from memjax._core.compat import explicit_sharding

_LAYOUT = ("NHWC", "HWIO", "NHWC")


def conv1x1(x: Float[Array, "*batch c"], kernel: Float[Array, "c k"]) -> Float[Array, "*batch k"]:
    return lax.dot_general(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))


def conv3x3(x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 c k"]) -> Float[Array, "b h w k"]:
    return lax.conv_general_dilated(x, kernel.astype(x.dtype), (1, 1), "SAME", dimension_numbers=_LAYOUT)


def conv3x3_backward(
    x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 c k"], dy: Float[Array, "b h w k"]
) -> tuple[Float[Array, "b h w c"], Float[Array, "3 3 c k"]]:
    """Gradients of `conv3x3(x, kernel)` with respect to both, in their dtypes.

    XLA:CPU has a library for convolutions in the forward layout only. Outside loops it transposes the others to it; in the
    body of a loop it runs them as plain loops, 4 to 60 times slower and with one long sum. So the layout is made here.
    """
    return lax.platform_dependent(x, kernel, dy, cpu=_in_forward_layout, default=_by_autodiff)


def _by_autodiff(x, kernel, dy):
    _, pull = jax.vjp(conv3x3, x, kernel)
    return pull(dy)


def _in_forward_layout(x, kernel, dy):
    # Left to itself, the compiler folds the transpositions back into the convolutions.
    swapped = lax.optimization_barrier(jnp.flip(kernel, (0, 1)).swapaxes(2, 3))
    x_by_channel, dy_by_batch = lax.optimization_barrier((x.transpose(3, 1, 2, 0), dy.transpose(1, 2, 0, 3)))
    pads = ((1, 1), (1, 1))
    sharding = explicit_sharding(jax.typeof(kernel))  # the batch is summed over, and may be sharded
    on_mesh = explicit_sharding(jax.typeof(x))
    if sharding is None and on_mesh is not None:  # a constant lies on no mesh
        sharding = on_mesh.update(spec=PartitionSpec())
    if sharding is not None:
        entries = list(sharding.spec) + [None] * (4 - len(sharding.spec))
        sharding = sharding.update(spec=PartitionSpec(*(entries[i] for i in (2, 0, 1, 3))))
    d_kernel = lax.conv_general_dilated(
        x_by_channel, dy_by_batch, (1, 1), pads, dimension_numbers=_LAYOUT, out_sharding=sharding
    )
    return conv3x3(dy, swapped), d_kernel.transpose(1, 2, 0, 3).astype(kernel.dtype)
