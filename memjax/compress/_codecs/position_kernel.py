"""The encoder of `PositionQuantized` as one kernel for NVIDIA GPUs: it reads the array once.

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
from jaxtyping import Array, Float

from memjax._core.arrays import vary, varying_axes
from memjax._core.compat import varying_like
from memjax.compress._codecs import dither
from memjax.compress._codecs.bits import u32
from memjax.compress._codecs.planes import PLANES, pack_pieces

_ROWS = 32  # positions of a program
_FEWEST_PIECES = 4  # of a group: shorter ones are packed in fewer instructions
_FEWEST = 2**16  # values of an array for which the kernel pays


def suits(shape: tuple[int, int, int], size: int) -> bool:
    """Whether the kernel can encode positions x groups x features of a group, and is worth it.

    Pallas asks the GPU at hand what it can: programs that are compiled for GPUs elsewhere get XLA's code.
    """
    positions, _, width = shape
    if not (_FEWEST <= size < 2**32 and positions % _ROWS == 0 and width & (width - 1) == 0 and width >= 64):
        return False
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return jax.default_backend() == "gpu" and capability is not None and float(capability) >= 8


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
    count = max(8 // min(PLANES[bits]), _FEWEST_PIECES)
    part = width // count
    multiply_add = _in_two_steps if interpret else _in_one_step

    def kernel(x_ref: Any, centre_ref: Any, inverse_ref: Any, *out: Any) -> None:
        *planes, low_ref, distance_ref = out
        row = u32(pl.program_id(0) * _ROWS) + lax.broadcasted_iota(jnp.uint32, (_ROWS, part), 0)
        column = u32(pl.program_id(1) * width) + lax.broadcasted_iota(jnp.uint32, (_ROWS, part), 1)
        place = row * u32(groups * width) + column
        pieces = [
            multiply_add(x_ref[:, i, :].astype(jnp.float32), inverse_ref[i, :][None], -centre_ref[i, :][None])
            for i in range(count)
        ]
        least, most = (_over(pieces, two, one) for two, one in ((jnp.minimum, jnp.min), (jnp.maximum, jnp.max)))
        # A maximum may lose a NaN; a sum does not, and 0 x infinity is one.
        nothing = jnp.zeros((_ROWS, part), jnp.float32)
        spoilt = jnp.sum(functools.reduce(lambda total, piece: multiply_add(piece, nothing, total), pieces, nothing), 1)
        low, distance, factor = levels(least + spoilt, most + spoilt)
        low_ref[:], distance_ref[:] = low, distance
        found, lowest = [], low.astype(jnp.float32)[:, None]
        for i, piece in enumerate(pieces):
            scaled = multiply_add(piece - lowest, factor[:, None], jnp.float32(dither.OFFSET))
            found.append(dither.level(scaled, place + u32(i * part)))
        for plane_ref, plane in zip(planes, pack_pieces(found, bits), strict=True):
            for i, piece in enumerate(plane):
                plane_ref[:, i, :] = piece.astype(jnp.uint8)

    block = lambda *shape: pl.BlockSpec((_ROWS, None, *shape), lambda i, j: (i, j, *[0] * len(shape)))
    whole = pl.BlockSpec((None, count, part), lambda i, j: (j, 0, 0))
    plane_counts = [count * bits_here // 8 for bits_here in PLANES[bits]]
    shapes: list[Any] = [jax.ShapeDtypeStruct((positions, groups, n, part), jnp.uint8) for n in plane_counts]
    shapes += [jax.ShapeDtypeStruct((positions, groups), jnp.bfloat16)] * 2
    args = [x.reshape(positions, groups, count, part), *(a.reshape(groups, count, part) for a in (centre, inverse))]
    if axes := varying_axes(*args):
        args = vary(args, axes)
        like = jax.typeof(args[0])
        shapes = [varying_like(like, a.shape, a.dtype) for a in shapes]
    *planes, low, distance = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(positions // _ROWS, groups),
        in_specs=[block(count, part), whole, whole],
        out_specs=[*(block(n, part) for n in plane_counts), block(), block()],
        interpret=interpret,
        **({} if interpret else {"compiler_params": _params()}),
    )(*args)
    return (*(plane.reshape(positions, groups, -1) for plane in planes), low, distance)


def _over(pieces: Sequence[Array], two: Any, one: Any) -> Array:
    total = pieces[0]
    for piece in pieces[1:]:
        total = two(total, piece)
    return one(total, 1)


def _in_two_steps(x: Array, y: Array, z: Array) -> Array:
    return x * y + z


def _in_one_step(x: Array, y: Array, z: Array) -> Array:
    """`x * y + z`, rounded once: Triton is told not to contract operations."""
    from jax.experimental.pallas import triton

    args = jnp.broadcast_arrays(x, y, z)
    like = jax.ShapeDtypeStruct(args[0].shape, jnp.float32)
    text = "fma.rn.f32 $0, $1, $2, $3;"
    [out] = triton.elementwise_inline_asm(text, args=args, constraints="=f,f,f,f", pack=1, result_shape_dtypes=[like])
    return out


def _params() -> Any:
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=4, num_stages=1)
