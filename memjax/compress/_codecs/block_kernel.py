"""The encoder of blocks as one kernel for NVIDIA GPUs, which reads the array once from memory, for the ranges and for the levels.

XLA reads it once for each. Here a program has some channels of one block in its registers; of a longer block it reads what does
not find room once more, from the cache.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, UInt, UInt8

from memjax.compress._codecs import kernels
from memjax.compress._codecs.bits import DITHER_OFFSET, IN_BYTES, as_pairs, paired, unpaired
from memjax.compress._codecs.kernels import has_kernels, is_of_one_device

_CHANNELS = 64  # of a program: 128 bytes of a row
_FEWEST_ROWS, _MOST_ROWS = 32, 2**12  # of a block, which one program encodes
_FEWEST = 2**16  # values of an array for which the kernel pays
_ROWS_OF_A_WARP = 4  # that it reads at a time: eight channels a thread
_HELD = 16  # of these reads, whose values stay in registers
_MOST_WARPS = 4  # of a program


def suits(aval: Any, view: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether the kernel can encode an array of this type in blocks x positions x channels, and is worth it."""
    if len(view) != 3 or axes != (1,) or any(axis is not None for axis in aval.sharding.spec):
        return False
    _, length, channels = view
    fits = channels % _CHANNELS == 0 and _FEWEST_ROWS <= length <= _MOST_ROWS and _FEWEST <= aval.size < 2**31
    return fits and is_of_one_device(aval) and has_kernels()


class End(NamedTuple):
    """An end of a range: the operation on two values, of which the largest keeps a NaN, and on all along an axis."""

    of_two: str
    of_all: Callable[..., Array]


LEAST, LARGEST = End("min", jnp.min), End("max.NaN", jnp.max)


# Levels are the second byte of an int32: what a multiplication and an addition leave in the digits of a float, of which the
# lowest eight stand for less than 1. A conversion to an integer would take as long as eight other instructions.


def rounded(x: Array, factor: Array, shift: Array, *, interpret: bool) -> Array:
    """`x * factor + shift`, which is from 0 to 255, rounded to the nearest integer, or nearly.

    Up to 1 / 256 is lost, and as much as one digit of a larger `shift`.
    """
    x = kernels.widened(x, interpret=interpret)
    digits = kernels.multiply_add(x, factor, shift + (0.5 + IN_BYTES), interpret=interpret)
    return lax.bitcast_convert_type(digits, jnp.int32)


def rounded_up(x: Array, factor: Array, *, interpret: bool) -> Array:
    """`x * factor`, from 0 to 255, as the next integer that is not below: at least 1 where x is positive, 0 elsewhere."""
    finite, zero = jnp.array(jnp.finfo(x.dtype).max, x.dtype), jnp.zeros((), x.dtype)
    of_two = functools.partial(kernels.of_two, interpret=interpret)
    x = kernels.widened(of_two("min", of_two("max", x, zero), finite), interpret=interpret)  # a NaN is not positive
    if interpret:
        return jnp.where(x > 0, jnp.clip(jnp.ceil(x * factor), 1, 255), 0).astype(jnp.int32) << 8
    return lax.bitcast_convert_type(kernels.upwards(x, factor, jnp.float32(DITHER_OFFSET)), jnp.int32)


def encode(
    x: Float[Array, "blocks positions channels"],
    bits: int,
    ends: Sequence[End],
    ranges: Callable[..., tuple[tuple[Array, ...], tuple[Array, ...]]],
    levels: Callable[..., Array],
    *,
    with_sums: bool = False,
    interpret: bool = False,
) -> tuple[
    UInt[Array, "blocks positions pairs"],
    list[Float[Array, "blocks 1 channels"]],
    Float[Array, "blocks 2 channels"] | None,
]:
    """Pairs of levels (`bits.paired`), the ranges of each channel of each block, and the sums of its values and their squares.

    Args:
      ranges: from the ends of each channel, float32, 1 x channels, to the ranges and to what `levels` gets, numbers for each
        channel, too. If a value is NaN, the largest is infinity.
      levels: from values, in the array's dtype, and these numbers to levels, the second bytes of int32.
    """
    blocks, length, channels = x.shape
    # As few warps as have room for a block: the fewer, the less is passed between them.
    warps = next(n for n in (1, 2, _MOST_WARPS) if n == _MOST_WARPS or length <= _HELD * n * _ROWS_OF_A_WARP)
    rows = warps * _ROWS_OF_A_WARP
    reads = pl.cdiv(length, rows)
    held = min(reads, 2 if interpret else _HELD)  # an interpreted program with many takes long to compile
    row_of_ends = jax.ShapeDtypeStruct((1, _CHANNELS), jnp.float32)
    kept = [one.dtype for one in jax.eval_shape(ranges, *[row_of_ends] * len(ends))[0]]
    count = len(kept)

    def kernel(x_ref: Any, level_ref: Any, *refs: Any) -> None:
        def place(i: Any) -> Array:
            # Rows beyond the block are its last row once more, which changes no range, and is written as it is.
            return jnp.minimum(i * rows + lax.iota(jnp.int32, rows), length - 1)

        def look(found: Sequence[Array], values: Array) -> list[Array]:
            pairs = zip(ends, found, strict=True)
            return [kernels.of_two(end.of_two, one, values, interpret=interpret) for end, one in pairs]

        def without_nan(values: Array) -> Array:  # which a maximum along an axis loses
            return jnp.where(values != values, jnp.array(jnp.inf, values.dtype), values)

        def write(i: Any, values: Array, totals: Sequence[Array]) -> list[Array]:
            level = levels(values, *used)
            level_ref[place(i), :] = _packed(level, bits, interpret=interpret)
            if not with_sums:
                return []
            wide = kernels.widened(values, interpret=interpret)
            if length % rows and (not isinstance(i, int) or i == reads - 1):
                wide = jnp.where(i * rows + lax.broadcasted_iota(jnp.int32, wide.shape, 0) < length, wide, 0.0)
            return [totals[0] + wide, kernels.multiply_add(wide, wide, totals[1], interpret=interpret)]

        first = [x_ref[place(i), :] for i in range(held)]
        found = functools.reduce(look, first[1:], [first[0]] * len(ends))
        found = lax.fori_loop(held, reads, lambda i, found: look(found, x_ref[place(i), :]), found)
        stored, used = ranges(
            *(
                end.of_all(without_nan(one), 0, keepdims=True).astype(jnp.float32)
                for end, one in zip(ends, found, strict=True)
            )
        )
        for ref, one in zip(refs[:count], stored, strict=True):
            ref[:] = one[0]
        totals = [jnp.zeros((rows, _CHANNELS), jnp.float32)] * 2 * with_sums
        for i, values in enumerate(first):
            totals = write(i, values, totals)
        totals = lax.fori_loop(held, reads, lambda i, totals: write(i, x_ref[place(i), :], totals), totals)
        for power, total in enumerate(totals):
            refs[count][power, :] = jnp.sum(total, 0)

    # Neighbouring programs have neighbouring channels of the same positions, so that what runs at a time reads whole rows.
    tile = lambda width: pl.BlockSpec((None, length, width), lambda j, i: (i, 0, j))
    levels_per_byte = 8 // bits
    outs: list[tuple[tuple[int, ...], Any]] = [((blocks, length, channels // levels_per_byte), jnp.uint8)]
    outs += [((blocks, channels), dtype) for dtype in kept]
    out_specs = [tile(_CHANNELS // levels_per_byte), *[pl.BlockSpec((None, _CHANNELS), lambda j, i: (i, j))] * count]
    if with_sums:
        outs.append(((blocks, 2, channels), jnp.float32))
        out_specs.append(pl.BlockSpec((None, 2, _CHANNELS), lambda j, i: (i, 0, j)))
    level, *found = kernels.call(
        kernel,
        [x],
        outs,
        grid=(channels // _CHANNELS, blocks),
        in_specs=[tile(_CHANNELS)],
        out_specs=out_specs,
        warps=warps,
        interpret=interpret,
    )
    level = level if bits == 4 else as_pairs(level, bits)
    return level, [one[:, None] for one in found[:count]], found[count] if with_sums else None


def _packed(levels: Int[Array, "rows channels"], bits: int, *, interpret: bool) -> UInt8[Array, "rows _"]:
    """The second bytes, or for 4 bits pairs of their lower four bits."""
    if bits == 4:
        return paired(levels >> 8, bits).astype(jnp.uint8)
    return kernels.second_bytes(levels, interpret=interpret)


# A kernel for NVIDIA GPUs that decodes blocks for operations that read their operands from memory, such as convolutions.
#
# XLA's code loads the numbers of a channel anew for each value, and takes 1.5 to 1.7 times as long. It is the better
# one where it is fused into what reads the values, for then no decoded array is written.

_MOST_CHANNELS = 256  # of a program
_VALUES = 2**11  # of a program
_WARPS = 2


def decode(
    pairs: UInt[Array, "blocks positions pairs"],
    numbers: Sequence[Float[Array, "blocks 1 channels"]],
    value: Callable[..., Array],
    bits: int,
    dtype: Any,
    *,
    interpret: bool = False,
) -> Float[Array, "blocks positions channels"]:
    """The values of levels of 4 or 8 bits, in `dtype`.

    Args:
      pairs: levels, see `bits.paired`; of a multiple of 64 channels.
      numbers: what `value` needs of each channel of each block.
      value: from levels, int32, and these numbers, 1 x channels, to values.
    """
    blocks, length, half = pairs.shape
    channels = 2 * half
    width = next(width for width in (_MOST_CHANNELS, 128, 64) if channels % width == 0)
    rows = min(_VALUES // width, pl.next_power_of_2(length))

    def kernel(pairs_ref: Any, *refs: Any) -> None:
        *number_refs, out_ref = refs
        # Rows beyond the block are its last row once more, which is written as it is.
        place = jnp.minimum(pl.program_id(1) * rows + lax.iota(jnp.int32, rows), length - 1)
        levels = unpaired(pairs_ref[place, :].astype(jnp.int32), bits)
        out_ref[place, :] = value(levels, *(ref[:][None] for ref in number_refs)).astype(dtype)

    tile = lambda width: pl.BlockSpec((None, length, width), lambda j, i, block: (block, 0, j))
    of_channels = pl.BlockSpec((None, width), lambda j, i, block: (block, j))
    [out] = kernels.call(
        kernel,
        [pairs, *(one.reshape(blocks, channels) for one in numbers)],
        [((blocks, length, channels), dtype)],
        grid=(channels // width, pl.cdiv(length, rows), blocks),
        in_specs=[tile(width // 2), *[of_channels] * len(numbers)],
        out_specs=[tile(width)],
        warps=_WARPS,
        interpret=interpret,
    )
    return out
