"""`memjax.compressed`: any function or Flax module, with what it saves for the backward pass in a fraction of the space.

After Jin et al. 2020, "A Novel Memory-Efficient Deep Learning Training Framework via Error-Bounded Lossy Compression".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
from flax import nnx

from memjax.compress import _linen, _nnx
from memjax.compress._codec import Codec
from memjax.compress._function import call_compressed
from memjax.compress._keep import SMALL, Which
from memjax.compress._layers import Layers, Recorder

F = TypeVar("F")


def compressed(
    f_or_module: F,
    codec: Codec | Layers,
    *,
    where: str | Callable[[str, Any], bool] | None = None,
    inputs: bool = False,
    smallest: int = SMALL,
) -> F:
    """The same function or module, its saved arrays passing through `codec` between forward and backward pass.

    Values are those of the original, gradients are computed from decoded arrays. Variables, their names and
    the module's signature do not change: a checkpoint of one loads in the other.

    Of what `jax.vjp` saves,

    - arrays that several saved ones are cheap functions of are saved once, in their place (a batch norm's input, which
      is otherwise saved twice);
    - bfloat16, float16 and float32 arrays of 4096 values, or `smallest`, or more are encoded, when computed, and decoded when a
      cotangent arrives that needs them, one at a time. What a batch norm reads is encoded with the bound in
      units of each channel's standard deviation, if the codec has such a bound;
    - boolean arrays are kept as bits, or not at all where they are the sign of something encoded (a ReLU before a
      convolution, with `ErrorBounded`);
    - of max-pooling the index of each maximum is kept, uint8, whatever `where` says;
    - constants are not kept; nor is what follows from smaller integer arrays by cheap operations, as floats do from images of
      bytes: it is computed again from these, which training keeps anyway. So let a module have bytes, and normalise inside it;
    - parameters and other variables of a module, what a function closes over, a function's arguments, integer, complex and
      float64 arrays, and small ones are left alone.

    Memory between forward and backward: the sum of `codec.nbytes` over the encoded arrays, and of the rest. Besides, one
    array at a time in full. Note that `ErrorBounded` without `bits_per_value` has codes larger than the arrays: it can
    never overflow. An overflow with `bits_per_value` shows as NaN in the gradients of weights.

    Wrapped twice, the outer codec gets what the inner one's `where` left: `compressed(compressed(net, codec, where="conv"),
    ChannelQuantized(4))`.

    Reverse mode, once: forward mode, and a second derivative, raise. Works under and around `jit`, `vmap`, `jax.checkpoint`,
    `jax.lax.scan`, `memjax.remat.scan` and `shard_map`, inside which each device encodes its own part.

    Args:
      f_or_module: a function of pytrees of arrays (other leaves are static), or an NNX or Linen module, whose `__call__`
        is meant. An NNX module shares its variables with the result.
      codec: for one, `memjax.compress.ErrorBounded(2**-7, bits_per_value=4)`; or `memjax.compress.layers`, with a bound for
        each array that training adapts.
      where: what to encode; None: everything above. "conv": what convolutions read, to which Jin et al. confine themselves.
        A pattern (`fnmatch`) for paths of submodules or parts of them, "encoder/*" or "Conv_*", or a predicate
        `where(path, x)`. For functions and Linen modules paths are `jax.named_scope`s in which an array is read (or made,
        if the forward pass does not read it), and x is its type; for NNX modules paths of submodules, and x the
        submodule, each of which is then compressed by itself.
      inputs: of a function, also encode its arguments, as if it were a module: for functions of values that nothing else
        keeps. A module's arguments, except its variables, are always encoded.
      smallest: number of values below which an array is not encoded; at least 4096. A GPU takes a certain time for any code,
        however small: leaving alone what is small beside the rest saves time for little memory.

    Raises:
      TypeError: no function or module, or no codec; forward mode or second derivatives.
      ValueError: `smallest` is negative; `where` matches nothing. For functions and Linen modules when differentiated.
    """
    if not isinstance(codec, Codec | Layers | Recorder):
        raise TypeError(f"codec must be a codec, such as memjax.compress.ErrorBounded(2**-7), got {codec!r}.")
    if where is not None and not isinstance(where, str) and not callable(where):
        raise TypeError(f'where must be "conv", a pattern, a predicate or None, got {where!r}.')
    if isinstance(smallest, bool) or not isinstance(smallest, int) or smallest < 0:
        raise ValueError(f"smallest must be a number of values, 0 or more, got {smallest!r}.")
    which = Which(where, max(smallest, SMALL))
    if isinstance(f_or_module, nnx.Module):
        return _nnx.compressed_module(f_or_module, codec, which)  # type: ignore[return-value]
    if isinstance(f_or_module, nn.Module):
        return _linen.compressed_module(f_or_module, codec, which)  # type: ignore[return-value]
    if not callable(f_or_module) or isinstance(f_or_module, type):
        raise TypeError(f"f_or_module must be a function or a Flax module, got {f_or_module!r}.")
    f = f_or_module

    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        call = lambda lasting, passing: f(*(passing if inputs else lasting)[0], **(passing if inputs else lasting)[1])
        groups = ((), (args, kwargs)) if inputs else ((args, kwargs), ())
        return call_compressed(call, *groups, codec=codec, which=which)

    return wrapped  # type: ignore[return-value]
