"""`_reference`'s encoding and decoding as kernels, in Pallas. Headers, the words of each tile, their number and decoded
values are the same, bit for bit; the order in which tiles lie in the words may be another, and another each time.

Pallas's Triton backend compiles them, deprecated since JAX 0.11 and still there in 0.12: Mosaic GPU has no such kernels of
single warps, and `jax_triton` would need a second source, that no CPU can run.

No temporary memory. A tile's input is read once (a raw lane's twice), its words are written
once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from memjax.compress._decode_kernel import decode_kernel
from memjax.compress._encode_kernel import encode_kernel
from memjax.compress._pallas_tile import Layout
from memjax.compress._reference import Packed
from memjax.compress._tiles import LANES, Grid
from memjax.compress._warp import Warp


def why_not() -> str | None:
    """Why these kernels cannot run, or None if they can."""
    if jax.default_backend() != "gpu" or "nvidia" not in jax.devices()[0].device_kind.lower():
        return "it needs an NVIDIA GPU"
    return None


def encode(x: Float[Array, "..."], exponent: Int32[Array, "..."], capacity: int, *, interpret: bool = False) -> Packed:
    """`exponent` is a scalar, or one for each channel."""
    layout = Layout(Grid.of(x.shape), x.dtype, capacity, exponent.size)
    tiles = layout.tiles
    if tiles == 0:
        none = jnp.zeros((0,), jnp.int32)
        return Packed(jnp.zeros((0,), jnp.uint32), jnp.zeros((0, LANES), jnp.uint8), none, jnp.int32(0))
    words, headers, offsets, needed = _call(
        functools.partial(encode_kernel, layout=layout, warp=Warp(not interpret)),
        layout,
        (
            jax.ShapeDtypeStruct((max(capacity, 1),), jnp.uint32),
            jax.ShapeDtypeStruct((tiles * LANES,), jnp.uint8),
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        interpret,
        input_output_aliases={2: 3},
    )(x.reshape(-1), exponent.reshape(-1), jnp.zeros((1,), jnp.int32))
    return Packed(words, headers.reshape(tiles, LANES), offsets, needed[0])


def decode(
    code: Packed, exponent: Int32[Array, "..."], shape: tuple[int, ...], dtype, *, interpret: bool = False
) -> Array:
    layout = Layout(Grid.of(shape), jnp.dtype(dtype), code.words.size, exponent.size)
    if layout.tiles == 0:
        return jnp.zeros(shape, dtype)
    kernel = functools.partial(decode_kernel, layout=layout, warp=Warp(not interpret))
    x = _call(kernel, layout, jax.ShapeDtypeStruct((layout.grid.size,), dtype), interpret)(
        code.words, code.headers.reshape(-1), code.offsets, code.needed.reshape(1), exponent.reshape(-1)
    )
    return x.reshape(shape)


def _call(kernel, layout: Layout, out_shape, interpret: bool, **options):
    """With whole arrays for the kernel to index, a warp per tile."""
    if not interpret:
        from jax.experimental.pallas import triton

        options["compiler_params"] = triton.CompilerParams(num_warps=1, num_stages=1)
    return pl.pallas_call(kernel, out_shape=out_shape, grid=(layout.tiles,), interpret=interpret, **options)
