"""The code of `x > 0` as a kernel for NVIDIA GPUs.

XLA reduces 32 bits to a word by a kernel that reads about half as many bytes in a second as the memory could give.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt32

from memjax.compress._codecs import kernels
from memjax.compress._codecs.bits import WORD
from memjax.compress._codecs.codec import DTYPES, Code, Mask
from memjax.compress._codecs.kernels import has_kernels, is_of_one_device

_FEWEST = 2**16  # values of an array for which the kernel pays
_FEWEST_WORDS, _MOST_WORDS = 32, 256  # of a program, which has the largest power of two that divides all words


def encode_positive(x: Float[Array, "..."]) -> Code:
    """What `Mask` makes of `x > 0`."""
    plain = lambda x: Mask().encode(x > jnp.zeros((), x.dtype))
    if not suits(jax.typeof(x)):
        return plain(x)
    mask: Any = jax.ShapeDtypeStruct(x.shape, jnp.bool_)
    by_kernel = lambda x: Mask().code_of(mask, pack_positive(x))
    return lax.platform_dependent(x, cuda=by_kernel, default=plain)


def suits(aval: Any) -> bool:
    """Whether the kernel can pack an array of this type, and is worth it."""
    if aval.dtype not in DTYPES or any(axis is not None for axis in aval.sharding.spec):
        return False
    fits = _FEWEST <= aval.size < 2**31 and aval.size % (WORD * _FEWEST_WORDS) == 0
    return fits and is_of_one_device(aval) and has_kernels()


def pack_positive(x: Float[Array, "..."], *, interpret: bool = False) -> UInt32[Array, " words"]:
    """Whether each value is positive: 32 of these a word, the first in the lowest bit."""
    words = x.size // WORD
    rows = min(words & -words, _MOST_WORDS)

    def kernel(x_ref: Any, word_ref: Any) -> None:
        bits = (x_ref[:, :] > 0).astype(jnp.uint32) << lax.broadcasted_iota(jnp.uint32, (rows, WORD), 1)
        word_ref[:] = jnp.sum(bits, 1, dtype=jnp.uint32)  # distinct bits: their sum is their union

    [packed] = kernels.call(
        kernel,
        [x.reshape(words, WORD)],
        [((words,), jnp.uint32)],
        grid=(words // rows,),
        in_specs=[pl.BlockSpec((rows, WORD), lambda i: (i, 0))],
        out_specs=[pl.BlockSpec((rows,), lambda i: (i,))],
        warps=4,
        interpret=interpret,
    )
    return packed
