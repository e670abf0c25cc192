"""`memjax.compressed`: any function or Flax module, with what it saves for the backward pass in a fraction of the space.

After Jin et al. 2020, "A Novel Memory-Efficient Deep Learning Training Framework via Error-Bounded Lossy Compression".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import flax.linen as nn
from flax import nnx
from jaxtyping import Array, Float

from memjax._core import check
from memjax._core.arguments import objects_in, put_changes, with_changes
from memjax.compress._codecs.codec import Codec
from memjax.compress._codecs.step_errors import UniformError
from memjax.compress._training.array_bits import ArrayBits
from memjax.compress._training.layers import Layers
from memjax.compress._transform import linen
from memjax.compress._transform import nnx as _nnx
from memjax.compress._transform.array_codecs import array_codecs
from memjax.compress._transform.differentiable import call_compressed
from memjax.compress._transform.keep.which import SMALL, Which

F = TypeVar("F")


def compressed(
    f_or_module: F,
    codec: Codec | Layers | None = None,
    *,
    bits: int | ArrayBits | None = None,
    sigma: float | None = None,
    where: str | Callable[[str, Any], bool] | None = None,
    inputs: bool | int | str | Sequence[int | str] = False,
    smallest: int = SMALL,
) -> F:
    """The same function or module, its saved arrays passing through `codec` between forward and backward pass.

    Values are those of the original, gradients are computed from decoded arrays. Variables, their names and
    the module's signature do not change: a checkpoint of one loads in the other.

    Without a codec an array gets one that suits it, of `bits` per value, for any finite values, that cannot overflow:
    `BlockQuantized` what convolutions and batch norms read, or after a ReLU a code in the same blocks that also tells the ReLU's
    mask; `PositionQuantized` all else. With fewer than 8 bits, arrays that are
    smaller than the largest get more, half a bit each time that their size halves, since they take fewer bytes. With 4 bits,
    those that other saved arrays are computed from, as gate and up are, get 5: their errors count several times.

    With `sigma` each array gets 8, 6, 5, 4 or 3 bits, or is kept as it is, and a call keeps the fewest bytes with which

        sigma^2 = 1/n sum_i (k_i e(b_i))^2,    e(b) = 1.5 / (2^b - 1)

    where b_i are the bits of the n encoded arrays, e is the relative error of normally distributed values, and k_i is 2 for what
    other saved arrays are computed from, and 1 for others. A weight's gradient
    is a sum over positions of products of an array with a cotangent. If both are independent and normally distributed, its
    relative error is that of the array, and `sigma` is the root mean square of the relative errors of gradients. Without data
    that is an assumption: `memjax.compress.fit_bits` measures it instead.

    Parameters are exact: whatever follows from a function's arguments or a module's variables by slicing, reshaping,
    transposing or casting is recomputed or kept, and so is what a module computes of its variables alone.

    What `jax.vjp` saves is treated as follows.

    - Arrays that follow cheaply from others are not saved: of a norm its input is, also for a ReLU of the norm, unless the codec
      keeps the zeros of all arrays (`ErrorBounded`); of a gated feed-forward layer the two products, and both are decoded once
      for all that follows from them. What is chosen takes the fewest bytes (a minimum cut of the function). A matrix product is
      repeated where that saves more bytes for its FLOPs than products write on average; the fewer the bits, the more readily:
      with 4 or 3 a Transformer's queries and keys are recomputed, with 8 they are kept. On a GPU, without a codec, it is also
      repeated where that takes less time than a code: of layers about 1,000 wide or less all is recomputed that comes by
      one product, and `bits` and `sigma` are about the rest.
    - Statistics of norms over features are recomputed where the norm's input is there.
    - What has to agree with something else is exact: kept, or recomputed from what is exact. So are the operands of
      exponentials of several saved arrays, as queries and keys with a log-sum-exp in attention; divisors, and what a root or a
      logarithm is taken of; and what kernels read that memjax does not know.
    - Other bfloat16, float16 and float32 arrays of 4096 values, or `smallest`, or more are encoded when they are computed, and
      decoded when a cotangent arrives that needs them, one at a time. What a batch norm reads is encoded with the bound in
      units of each channel's standard deviation, if the codec has such a bound. An array whose code would be larger is
      kept as it is; if that holds for all of them, a warning says so when tracing.
    - Boolean arrays are kept as bits, or not at all where they are the sign of something encoded (a ReLU before a
      convolution, without a codec or with `ErrorBounded`).
    - Loops (`jax.lax.scan`) encode in each iteration what it keeps, if that is large enough; so only codes are stacked.
      With `layers`, or bits for each array, the stacks of all iterations are encoded after the loop.
    - Max-pooling keeps the index of each maximum, uint8, whatever `where` says.
    - Constants are not kept. What follows from smaller integer arrays by cheap operations, as floats do from images of
      bytes, is recomputed from these, which training keeps anyway. So give a module bytes, and normalise inside it.
    - Parameters and other variables of a module, what a function closes over, a function's arguments, integer, complex and
      float64 arrays, and small ones are left alone.

    Memory between forward and backward: the sum of `codec.nbytes` over the encoded arrays, and the bytes of the arrays that are
    kept as they are. The backward pass besides holds one decoded array at a time.

    `ErrorBounded` with `bits_per_value` has codes that can overflow: gradients are NaN then, and the host issues a
    `memjax.compress.CapacityWarning`, once, with the bits that were needed. `memjax.compress.transactional` repeats such steps.

    Wrapped twice, the outer codec gets what the inner one's `where` left: `compressed(compressed(net, codec, where="conv"),
    ChannelQuantized(4))`.

    Reverse mode, once: forward mode, and a second derivative, raise. Works under and around `jit`, `vmap`, `jax.checkpoint`,
    `jax.lax.scan`, `memjax.remat.scan` and `shard_map`, inside which each device encodes its own part.

    Source: Jin et al. 2020, section 3.

    Args:
      f_or_module: a function of pytrees of arrays (other leaves are static), or an NNX or Linen module, or a class of Linen
        modules. Calls are compressed, and so are its other public methods. An NNX module shares its variables with the result,
        whose submodules are compressed, too, where a loss calls them; methods without arrays among their arguments are left
        alone. Of Linen, `method` of `apply` may be any function of the module; what is read from a bound module are
        compressed copies of its submodules, with the same variables.
      codec: one for all arrays, such as `memjax.compress.ErrorBounded(2**-7, bits_per_value=9)`; or `memjax.compress.layers`,
        with a bound for each array that training adapts. None: one that suits each array, as above.
      bits: bits per value without a codec: 8, 6, 4 or 3; 8 if left out. What convolutions and batch norms read has 8 or 4. Or
        bits for each array: what `memjax.compress.fit_bits` found.
      sigma: in place of bits: by how much gradients may be off, such as 0.01, as above.
      where: what to encode; None: everything above. "conv": what convolutions read, to which Jin et al. confine themselves.
        A pattern (`fnmatch`) for paths of submodules or parts of them, "encoder/*" or "Conv_*", or a predicate
        `where(path, x)`. For functions and Linen modules paths are `jax.named_scope`s in which an array is read (or made,
        if the forward pass does not read it), and x is its type; for NNX modules paths of submodules, and x the
        submodule, each of which is then compressed by itself.
      inputs: which arguments of a function are activations, to be encoded like what is computed of them: their positions or
        names, one or several (`inputs=1` for `f(params, x)`), True for all, False for none, since a caller mostly keeps
        them anyway. The other arguments, parameters among them, are never encoded. A module's arguments, except its
        variables, are always activations.
      smallest: number of values below which an array is not encoded; at least 4096. A GPU takes a certain time for any code,
        however small: leaving alone what is small beside the rest saves time for little memory.

    Raises:
      TypeError: no function or module, or no codec; forward mode or second derivatives.
      ValueError: `bits` is none of these, or those of another number of arrays; `sigma` is not positive; two of `codec`, `bits`
        and `sigma` are given; `smallest` is negative; `inputs` names no argument; `where`
        matches nothing, for functions and Linen modules when called or differentiated.
    """
    codecs = array_codecs(codec, bits, sigma)
    if where == "" or not (where is None or isinstance(where, str) or callable(where)):
        raise check.fail(TypeError, "where", '"conv", a pattern, a predicate or None', where)
    if callable(where):
        check.function("where", where, "where(scope, type) says whether to encode what is read there", arguments=2)
    which = Which(where, max(check.integer("smallest", smallest, least=0, what="a number of values"), SMALL))
    is_linen_class = isinstance(f_or_module, type) and issubclass(f_or_module, nn.Module)
    if (is_linen_class or isinstance(f_or_module, nnx.Module | nn.Module)) and inputs is not False:
        raise check.fail(ValueError, "inputs", "left out for a module", inputs, "its arguments are always activations")
    if isinstance(f_or_module, nnx.Module):
        return _nnx.compressed_module(f_or_module, codecs, which)  # type: ignore[return-value]
    if isinstance(f_or_module, nn.Module):
        return linen.compressed_module(f_or_module, codecs, which)  # type: ignore[return-value]
    if is_linen_class:
        return linen.compressed_class(f_or_module, codecs, which)  # type: ignore
    if isinstance(f_or_module, type) or not callable(f_or_module):
        fix = "make an instance first" if isinstance(f_or_module, type) else ""
        raise check.fail(TypeError, "f_or_module", "a function or a Flax module", f_or_module, fix)
    f = f_or_module
    named = _activations(f, inputs)

    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        chosen = named(args, kwargs)

        def call(lasting, passing):
            args, kwargs = _joined(lasting, passing, chosen)
            return with_changes(f, args, kwargs)

        out, changes = call_compressed(call, *_split(args, kwargs, chosen), user=f, codecs=codecs, which=which)
        put_changes(objects_in((args, kwargs)), changes)
        return out

    return wrapped  # type: ignore[return-value]


def inject_error(
    f_or_module: F,
    bound: float | Float[Array, ""],
    *,
    seed: Any = 0,
    zeros: bool = False,
    where: str | Callable[[str, Any], bool] | None = "conv",
    inputs: bool = False,
) -> F:
    """`compressed` with random errors in place of a codec's: uniform in [-bound, bound], and none for zeros.

    This is the model of errors of Jin et al. 2020, section 3. With it the errors of gradients are normally distributed, with the
    standard deviation that `predicted_sigma` gives. No memory is saved.

    Args:
      f_or_module, where, inputs: see `compressed`; by default errors go to what convolutions read.
      bound: the largest error; a positive number.
      seed: an integer, which may be traced. Another seed gives other errors.
      zeros: whether zeros get errors, as in the paper's figure 6a.

    Raises:
      ValueError, TypeError: those of `compressed`; `bound` is not positive.
    """
    return compressed(f_or_module, UniformError(bound, seed, zeros), where=where, inputs=inputs)


# Which arguments of a function are activations. The others last until the backward pass anyway.

Keys = set[int | str]
"""Positions of positional arguments, and names of the others."""


def _activations(
    f: Callable[..., Any], inputs: bool | int | str | Sequence[int | str]
) -> Callable[[tuple[Any, ...], dict[str, Any]], Keys]:
    """A function from the arguments of a call of `f` to the keys of those that `inputs` names: see `memjax.compressed`."""
    if isinstance(inputs, bool):
        return lambda args, kwargs: {*range(len(args)), *kwargs} if inputs else set()
    wanted = "True, False, or positions and names of arguments"
    names = (inputs,) if isinstance(inputs, int | str) else inputs
    if not isinstance(names, Sequence):
        raise check.fail(TypeError, "inputs", wanted, inputs)
    names = [name if isinstance(name, str) else check.integer("inputs", name, what=wanted) for name in names]
    try:
        parameters = list(inspect.signature(f).parameters)
    except (TypeError, ValueError):  # a function without a signature that Python can see
        parameters = []

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Keys:
        keys: Keys = set()
        for name in names:
            key: int | str = name
            if isinstance(name, str):
                if name not in kwargs and name in parameters:
                    key = parameters.index(name)
            elif name < 0:
                key = len(args) + name
            if key not in kwargs and not (isinstance(key, int) and 0 <= key < len(args)):
                call = f"a call with {len(args)} positional arguments and the names {sorted(kwargs)}"
                raise ValueError(f"inputs must be positions and names of arguments, got {name!r} for {call}")
            keys.add(key)
        return keys

    return named


def _split(args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Keys) -> tuple[Any, Any]:
    """The other arguments and the chosen ones: two calls' arguments, with None where the argument is in the other."""
    part = lambda inside: (
        tuple(arg if (i in chosen) == inside else None for i, arg in enumerate(args)),
        {name: arg if (name in chosen) == inside else None for name, arg in kwargs.items()},
    )
    return part(False), part(True)


def _joined(others: Any, chosen_ones: Any, chosen: Keys) -> tuple[list[Any], dict[str, Any]]:
    """The inverse of `_split`."""
    args = [chosen_ones[0][i] if i in chosen else arg for i, arg in enumerate(others[0])]
    return args, {name: chosen_ones[1][name] if name in chosen else arg for name, arg in others[1].items()}
