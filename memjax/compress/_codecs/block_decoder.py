"""The decoder of blocks as a kernel for NVIDIA GPUs, for what reads decoded values from memory, as convolutions do.

XLA's code loads the numbers of a channel anew for each value, and takes 1.5 to 1.7 times as long. It is the better one where it
is fused into what reads the values, for then no decoded array is written.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt

from memjax.compress._codecs.launch import on_same_axes, params
from memjax.compress._codecs.pairs import unpaired

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
    """The values of levels, in `dtype`.

    Args:
      pairs: levels, see `pairs.py`; of a multiple of 64 channels.
      numbers: what `value` needs of each channel of each block.
      value: from levels, int32, and these numbers, 1 x channels, to values.
      bits: 4 or 8.
      dtype: of the values.
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
    args, [out] = on_same_axes(
        [pairs, *(one.reshape(blocks, channels) for one in numbers)], [((blocks, length, channels), dtype)]
    )
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(channels // width, pl.cdiv(length, rows), blocks),
        in_specs=[tile(width // 2), *[of_channels] * len(numbers)],
        out_specs=tile(width),
        interpret=interpret,
        **({} if interpret else {"compiler_params": params(num_warps=_WARPS)}),
    )(*args)
