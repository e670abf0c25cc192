"""The encoder of blocks as one kernel for NVIDIA GPUs, which reads the array once from memory, for the ranges and for the levels.

XLA reads it once for each. Here a program has some channels of one block in its registers; of a longer block it reads what does
not find room once more, from the cache.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt

from memjax.compress._codecs import kernels
from memjax.compress._codecs.bits import WIDTHS, paired, unpaired
from memjax.compress._codecs.kernels import has_kernels, is_of_one_device

_CHANNELS = 64  # of a program: 128 bytes of a row
_FEWEST_ROWS, _MOST_ROWS = 32, 2**12  # of a block, which one program encodes
_FEWEST = 2**16  # values of an array for which the kernel pays
_ROWS = 256  # that a program has in its registers
_VALUES_OF_A_WARP = 2**12  # many of a channel for each thread, which computes the channel's ranges by itself
_INTEGERS = 1.5 * 2.0**23  # floats around it are integers, whose last digits count them


def suits(aval: Any, view: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether the kernel can encode an array of this type in blocks x positions x channels, and is worth it."""
    if len(view) != 3 or axes != (1,) or any(axis is not None for axis in aval.sharding.spec):
        return False
    _, length, channels = view
    fits = channels % _CHANNELS == 0 and _FEWEST_ROWS <= length <= _MOST_ROWS and _FEWEST <= aval.size < 2**31
    return fits and is_of_one_device(aval) and has_kernels()


class End(NamedTuple):
    """An end of a range: of two values, and of all along an axis."""

    of_two: Callable[[Array, Array], Array]
    of_all: Callable[..., Array]


LEAST, LARGEST = End(jnp.minimum, jnp.min), End(jnp.maximum, jnp.max)


def inverse(x: Array, *, interpret: bool) -> Array:
    """1 / x, or nearly."""
    return 1 / x if interpret else kernels.reciprocal(x)


def rounded(x: Array, factor: Array, shift: Array, *, interpret: bool) -> Array:
    """`x * factor + shift`, which is from 0 to 255, rounded to an integer in the lowest bits of an int32.

    Adding 1.5 * 2^23 puts the integer into the lowest bits of the float. A conversion to an integer would take as long as
    eight other instructions.
    """
    multiply_add = kernels.interpreted if interpret else kernels.nearest
    return lax.bitcast_convert_type(multiply_add(x.astype(jnp.float32), factor, shift) + _INTEGERS, jnp.int32)


def rounded_up(x: Array, factor: Array, *, interpret: bool) -> Array:
    """`x * factor`, from 0 to 255, as the next integer that is not below: at least 1 where x is positive, 0 elsewhere."""
    finite = jnp.minimum(x, jnp.array(jnp.finfo(x.dtype).max, x.dtype))
    x = jnp.where(x > 0, finite, jnp.zeros((), x.dtype)).astype(jnp.float32)  # a NaN is not positive
    if interpret:
        above = jnp.where(x > 0, jnp.clip(jnp.ceil(x * factor), 1, 255), 0)
        return lax.bitcast_convert_type(above + _INTEGERS, jnp.int32)
    return lax.bitcast_convert_type(kernels.upwards(x, factor, jnp.float32(_INTEGERS)), jnp.int32)


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
      levels: from values, in the array's dtype, and these numbers to levels, int32, in the lowest bits.
    """
    blocks, length, channels = x.shape
    rows = min(_ROWS, pl.next_power_of_2(length))
    passes = pl.cdiv(length, rows)
    row_of_ends = jax.ShapeDtypeStruct((1, _CHANNELS), jnp.float32)
    count = len(jax.eval_shape(ranges, *[row_of_ends] * len(ends))[0])

    def kernel(x_ref: Any, level_ref: Any, *refs: Any) -> None:
        def place(i: Any) -> Array:
            # Rows beyond the block are its last row once more, which changes no range, and is written as it is.
            return jnp.minimum(i * rows + lax.iota(jnp.int32, rows), length - 1)

        def without_nan(values: Array) -> Array:  # which a maximum loses
            return jnp.where(values != values, jnp.array(jnp.inf, values.dtype), values)

        def sums(i: Any, values: Array) -> list[Array]:  # last: with them between, it would take more registers
            if not with_sums:
                return []
            if length % rows:
                is_first = i * rows + lax.broadcasted_iota(jnp.int32, values.shape, 0) < length
                values = jnp.where(is_first, values, jnp.zeros((), values.dtype))
            values = values.astype(jnp.float32)
            return [jnp.sum(power, 0, keepdims=True) for power in (values, values * values)]

        def look(i: Any, found: Sequence[Array]) -> list[Array]:
            values = without_nan(x_ref[place(i), :])
            return [end.of_two(one, values) for end, one in zip(ends, found, strict=True)]

        def write(i: Any, totals: Sequence[Array]) -> list[Array]:
            values = x_ref[place(i), :] if passes > 1 else first
            level = levels(values, *used)
            level_ref[place(i), :] = paired(level, bits).astype(level_ref.dtype)
            return [total + more for total, more in zip(totals, sums(i, values), strict=True)]

        first = x_ref[place(0), :]
        found = lax.fori_loop(1, passes, look, [without_nan(first)] * len(ends))
        stored, used = ranges(
            *(end.of_all(one, 0, keepdims=True).astype(jnp.float32) for end, one in zip(ends, found, strict=True))
        )
        for ref, one in zip(refs[:count], stored, strict=True):
            ref[:] = one[0]
        totals = [jnp.zeros((1, _CHANNELS), jnp.float32)] * 2 * with_sums
        for power, total in enumerate(lax.fori_loop(0, passes, write, totals)):
            refs[count][power, :] = total[0]

    # Neighbouring programs have neighbouring channels of the same positions, so that what runs at a time reads whole rows.
    tile = lambda width: pl.BlockSpec((None, length, width), lambda j, i: (i, 0, j))
    outs: list[tuple[tuple[int, ...], Any]] = [((blocks, length, channels // 2), WIDTHS[bits].pair)]
    outs += [((blocks, channels), jnp.float32)] * count
    out_specs = [tile(_CHANNELS // 2), *[pl.BlockSpec((None, _CHANNELS), lambda j, i: (i, j))] * count]
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
        warps=max(1, rows * _CHANNELS // _VALUES_OF_A_WARP),
        interpret=interpret,
    )
    return level, [one[:, None] for one in found[:count]], found[count] if with_sums else None


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
