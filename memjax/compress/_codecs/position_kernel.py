"""The encoder of `PositionQuantized` as two kernels for NVIDIA GPUs: one measures channels, one reads the array once and encodes.

XLA reads it once for the ranges and once for each array of levels, and is bound by arithmetic on single bytes. Here a program
has some positions of one group in its registers from the first to the last step. What it computes is written down once, in
`position_quantized`: the kernel is given those functions. Pallas's Triton backend compiles it, which is deprecated since JAX 0.11
and still there in 0.12.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt32

from memjax.compress._codecs import kernels
from memjax.compress._codecs.bits import DITHER_OFFSET, WIDTHS, hashes_of_rows, u32
from memjax.compress._codecs.kernels import has_kernels, is_of_one_device

SAMPLES = 256
"""Positions from which channels are measured."""

_ROWS = 16  # positions of a program of one warp: with more warps ranges would be passed between them
_NARROWEST, _WIDEST = 64, 1024  # groups: of the widest a thread has 512 values
_HALVES = 2  # of a group, whose levels of 4 bits share bytes
_FEWEST = 2**16  # values of an array for which the kernel pays
_PRIME = 37  # samples are as far apart as that, and not at the same place of each stretch


def suits(aval: Any, shape: tuple[int, int, int]) -> bool:
    """Whether the kernel can encode an array of this type in positions x groups x features of a group, and is worth it."""
    positions, _, width = shape
    fits = _FEWEST <= aval.size < 2**32 and positions % _ROWS == 0 and width & (width - 1) == 0
    return fits and _NARROWEST <= width <= _WIDEST and is_of_one_device(aval) and has_kernels()


def measure(
    x: Float[Array, "positions groups width"],
    of_samples: Callable[[Array], tuple[Array, Array]],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "groups width"], Float[Array, "groups width"]]:
    """What `of_samples` gives for 256 positions of each group, float32: two numbers for each channel.

    XLA makes a kernel of each sum, for which a launch takes longer than the sum.
    """
    positions, groups, width = x.shape
    stride = positions // SAMPLES

    def kernel(x_ref: Any, first_ref: Any, second_ref: Any) -> None:
        sample = lax.iota(jnp.int32, SAMPLES)
        place = sample * stride + (sample * _PRIME) % stride
        first_ref[:], second_ref[:] = of_samples(x_ref[place, :].astype(jnp.float32))

    return tuple(
        kernels.call(
            kernel,
            [x],
            [((groups, width), jnp.float32)] * 2,
            grid=(groups,),
            in_specs=[pl.BlockSpec((positions, None, width), lambda j: (0, j, 0))],
            out_specs=[pl.BlockSpec((None, width), lambda j: (j, 0))] * 2,
            warps=16,
            interpret=interpret,
        )
    )


def encode(
    x: Float[Array, "positions groups width"],
    centre: Float[Array, "groups width"],
    inverse: Float[Array, "groups width"],
    bits: int,
    levels: Callable[..., Any],
    *,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """The planes, lowest levels and distances of `x * inverse - centre`.

    Args:
      levels: gives the lowest level and the distance of a range.
    """
    positions, groups, width = x.shape
    part = width // _HALVES
    multiply_add = functools.partial(kernels.multiply_add, interpret=interpret)

    def kernel(x_ref: Any, shift_ref: Any, inverse_ref: Any, *out: Any) -> None:
        *planes, low_ref, distance_ref = out
        row = u32(pl.program_id(1) * _ROWS) + lax.broadcasted_iota(jnp.uint32, (_ROWS, part // 4), 0)
        column = u32(pl.program_id(0) * width) + u32(4) * lax.broadcasted_iota(jnp.uint32, (_ROWS, part // 4), 1)
        place = row * u32(groups * width) + column  # of each fourth value
        pieces = [
            multiply_add(
                kernels.widened(x_ref[:, i, :], interpret=interpret), inverse_ref[i, :][None], shift_ref[i, :][None]
            )
            for i in range(_HALVES)
        ]
        most = kernels.of_two("max.NaN", *pieces, interpret=interpret)
        most = jnp.where(most != most, jnp.inf, most)  # a maximum along an axis may lose a NaN
        least = jnp.min(kernels.of_two("min", *pieces, interpret=interpret), 1)
        low, distance, factor = levels(least, jnp.max(most, 1))
        low_ref[:], distance_ref[:] = low, distance
        found, lowest = [], low.astype(jnp.float32)[:, None]
        for i, piece in enumerate(pieces):
            # Not one multiplication and addition: the lowest level in steps has no digits left for a small part of a step.
            scaled = multiply_add(piece - lowest, factor[:, None], jnp.float32(DITHER_OFFSET))
            digits, hashes = lax.bitcast_convert_type(scaled, jnp.uint32), hashes_of_rows(place + u32(i * part))
            found.append(kernels.less_bytes(digits, hashes, interpret=interpret))
        for plane_ref, plane in zip(planes, _packed(found, bits, interpret=interpret), strict=True):
            for i, piece in enumerate(plane):
                plane_ref[:, i, :] = piece.astype(jnp.uint8)

    # Neighbouring programs have neighbouring groups of the same positions, so that what runs at a time reads whole rows.
    block = lambda *shape: pl.BlockSpec((_ROWS, None, *shape), lambda j, i: (i, j, *[0] * len(shape)))
    whole = pl.BlockSpec((None, _HALVES, part), lambda j, i: (j, 0, 0))
    planes_in_pieces = jax.eval_shape(
        lambda half: _packed([half, half], bits, interpret=True), jax.ShapeDtypeStruct((1, part), jnp.uint32)
    )
    shapes_of_planes = [(len(pieces), pieces[0].shape[1]) for pieces in planes_in_pieces]
    outs: list[tuple[tuple[int, ...], Any]] = [((positions, groups, *shape), jnp.uint8) for shape in shapes_of_planes]
    outs += [((positions, groups), jnp.bfloat16)] * 2
    args = [
        x.reshape(positions, groups, _HALVES, part),
        *(a.reshape(groups, _HALVES, part) for a in (-centre, inverse)),
    ]
    *planes, low, distance = kernels.call(
        kernel,
        args,
        outs,
        grid=(groups, positions // _ROWS),
        in_specs=[block(_HALVES, part), whole, whole],
        out_specs=[*(block(*shape) for shape in shapes_of_planes), block(), block()],
        warps=1,
        interpret=interpret,
    )
    return (*(plane.reshape(positions, groups, -1) for plane in planes), low, distance)


def _packed(digits: Sequence[UInt32[Array, "rows part"]], bits: int, *, interpret: bool) -> Sequence[Sequence[Array]]:
    """The planes of `bits.pack_levels` of two halves of levels, the second bytes of `digits`, each in one piece or two."""
    levels = [kernels.second_bytes(half, interpret=interpret) for half in digits]
    planes, below = list[Sequence[Array]](), 0
    for width in WIDTHS[bits].planes:
        if width == 8:
            planes.append(levels)
        elif width == 4:
            planes.append([kernels.nibbles(*levels, interpret=interpret)])
        else:
            planes.append([kernels.packed_neighbours(half, below, width, interpret=interpret) for half in levels])
        below += width
    return planes
