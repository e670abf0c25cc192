"""Encoding and decoding by Pallas kernels. Headers, the words of each tile, their number and decoded values are those of
`reference`, bit for bit; the order of the tiles among the words may differ, from run to run, too.

Pallas's Triton backend compiles the kernels. It is deprecated since JAX 0.11 and still there in 0.12. Mosaic GPU has no kernels
of single warps, and `jax_triton` would need a second source that no CPU can run.

The kernels need no temporary memory. They read a tile once, or twice if it has raw lanes or negative values, and write its words
once. If not all words of a tile fit into the code, none is written.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from memjax._core.platforms import traced_device
from memjax.compress._codecs.kernels import call_on_whole_arrays
from memjax.compress._error_bounded import reference
from memjax.compress._error_bounded.decode_kernel import decode_tile
from memjax.compress._error_bounded.encode_kernel import encode_tile
from memjax.compress._error_bounded.pallas_tile import Layout, Where, sizes
from memjax.compress._error_bounded.reference import Packed
from memjax.compress._error_bounded.tiles import LANES, Grid
from memjax.compress._error_bounded.warp import Warp


def why_not() -> str | None:
    """Why these kernels cannot run, or None if they can."""
    device = traced_device()
    if device.platform != "gpu" or "nvidia" not in device.device_kind.lower():
        return "it needs an NVIDIA GPU"
    if float(device.compute_capability) < 9:
        return f"it needs an NVIDIA GPU of compute capability 9.0 or later, this one has {device.compute_capability}"
    try:
        from memjax.compress._error_bounded import kernel_memory  # noqa: F401
    except ImportError:
        return f"it needs what Pallas is made of, which JAX {jax.__version__} has no longer"
    return None


def encode(x: Float[Array, "..."], exponent: Int32[Array, "..."], capacity: int, *, interpret: bool = False) -> Packed:
    """`exponent` is a scalar, or one for each channel."""
    grid = Grid.of(x.shape)
    tiles = grid.tiles
    if tiles == 0:
        return reference.encode(x, exponent, capacity)
    words, headers, offsets, needed = _call(
        encode_tile,
        (sizes(grid, exponent.size, capacity), x.reshape(-1), exponent.reshape(-1), jnp.zeros((1,), jnp.int32)),
        Layout.of(grid, x.dtype, exponent.size),
        grid,
        [
            ((max(capacity, 1),), jnp.uint32),
            ((tiles * LANES,), jnp.uint8),
            ((tiles,), jnp.int32),
            ((1,), jnp.int32),
        ],
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
    [x] = _call(
        _DECODE_TILE[keeps_signs],
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
        [((grid.size,), dtype)],
        interpret,
    )
    return x.reshape(shape)


_DECODE_TILE = {flag: functools.partial(decode_tile, keeps_signs=flag) for flag in (True, False)}


def _call(of_tile, args, layout: Layout, grid: Grid, outs, interpret: bool, **options):
    """Run `of_tile` for every tile, each in a warp."""
    kernel = _kernel(of_tile, layout, interpret)
    return call_on_whole_arrays(kernel, args, outs, programs=grid.tiles, warps=1, interpret=interpret, **options)


@functools.cache
def _kernel(of_tile, layout: Layout, interpret: bool):
    def kernel(sizes_ref, *refs):
        of_tile(Where.of(layout, Warp(not interpret), pl.program_id(0), sizes_ref), *refs)

    return kernel
