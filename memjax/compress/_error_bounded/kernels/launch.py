"""`reference`'s encoding and decoding as kernels, in Pallas. Headers, the words of each tile, their number and decoded
values are the same, bit for bit; the order in which tiles lie in the words may be another, and another each time.

Pallas's Triton backend compiles them, deprecated since JAX 0.11 and still there in 0.12: Mosaic GPU has no such kernels of
single warps, and `jax_triton` would need a second source, that no CPU can run.

No temporary memory. A tile's input is read once, or twice with raw lanes or negative values in it, and its words are written
once. If not all words of a tile fit into the code, none is written.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from memjax.compress._error_bounded.kernels.decode import decode_tile
from memjax.compress._error_bounded.kernels.encode import encode_tile
from memjax.compress._error_bounded.kernels.pallas_tile import Layout, Where, sizes
from memjax.compress._error_bounded.kernels.whole_arrays import call
from memjax.compress._error_bounded.reference import Packed
from memjax.compress._error_bounded.tiles import LANES, Grid
from memjax.compress._error_bounded.warp import Warp


def why_not() -> str | None:
    """Why these kernels cannot run, or None if they can."""
    device = jax.devices()[0]
    if jax.default_backend() != "gpu" or "nvidia" not in device.device_kind.lower():
        return "it needs an NVIDIA GPU"
    if float(device.compute_capability) < 9:
        return f"it needs an NVIDIA GPU of compute capability 9.0 or later, this one has {device.compute_capability}"
    try:
        from memjax.compress._error_bounded.kernels import kernel_memory  # noqa: F401
    except ImportError:
        return f"it needs what Pallas is made of, which JAX {jax.__version__} has no longer"
    return None


def encode(x: Float[Array, "..."], exponent: Int32[Array, "..."], capacity: int, *, interpret: bool = False) -> Packed:
    """`exponent` is a scalar, or one for each channel."""
    grid = Grid.of(x.shape)
    tiles = grid.tiles
    if tiles == 0:
        none = jnp.zeros((0,), jnp.int32)
        return Packed(jnp.zeros((0,), jnp.uint32), jnp.zeros((0, LANES), jnp.uint8), none, jnp.int32(0))

    words, headers, offsets, needed = _call(
        _encode_tile,
        (
            sizes(grid, exponent.size, capacity),
            x.reshape(-1),
            exponent.reshape(-1),
            jnp.zeros((1,), jnp.int32),
        ),
        Layout.of(grid, x.dtype, exponent.size),
        grid,
        (
            jax.ShapeDtypeStruct((max(capacity, 1),), jnp.uint32),
            jax.ShapeDtypeStruct((tiles * LANES,), jnp.uint8),
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        interpret,
        input_output_aliases={3: 3},
    )
    return Packed(words, headers.reshape(tiles, LANES), offsets, needed[0])


def decode(
    code: Packed,
    exponent: Int32[Array, "..."],
    shape: tuple[int, ...],
    dtype,
    *,
    keeps_signs: bool = True,
    interpret: bool = False,
) -> Array:
    grid = Grid.of(shape)
    if grid.tiles == 0:
        return jnp.zeros(shape, dtype)
    x = _call(
        _decode_tile if keeps_signs else _decode_tile_without_signs,
        (
            sizes(grid, exponent.size, code.words.size),
            code.words,
            code.headers.reshape(-1),
            code.offsets,
            code.needed.reshape(1),
            exponent.reshape(-1),
        ),
        Layout.of(grid, dtype, exponent.size),
        grid,
        jax.ShapeDtypeStruct((grid.size,), dtype),
        interpret,
    )
    return x.reshape(shape)


def _encode_tile(where, x_ref, exponent_ref, _, *refs):
    encode_tile(where, x_ref, exponent_ref, *refs)


def _decode_tile(where, *refs):
    decode_tile(where, *refs, keeps_signs=True)


def _decode_tile_without_signs(where, *refs):
    decode_tile(where, *refs, keeps_signs=False)


def _call(of_tile, args, layout: Layout, grid: Grid, out_shape, interpret: bool, **options):
    """`of_tile` for every tile, by a warp each."""
    kernel = _kernel(of_tile, layout, interpret)
    return call(kernel, args, out_shape, programs=grid.tiles, warps=1, interpret=interpret, **options)


@functools.cache
def _kernel(of_tile, layout: Layout, interpret: bool):
    def kernel(sizes_ref, *refs):
        of_tile(Where.of(layout, Warp(not interpret), pl.program_id(0), sizes_ref), *refs)

    return kernel
