"""`memjax.compressed`: any function or Flax module, with what it saves for the backward pass in a fraction of the space.

Optimizers, whose state lies in codes, are in `memjax/compress/_state/`.

After Jin et al. 2020, "A Novel Memory-Efficient Deep Learning Training Framework via Error-Bounded Lossy Compression".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import optax
from flax import nnx

from memjax._core import check
from memjax._core.arguments import objects_in, put_changes, with_changes
from memjax._core.patterns import matches
from memjax.compress._codecs.codec import Codec
from memjax.compress._state.coded import coded_optimizer
from memjax.compress._training.array_bits import ArrayBits
from memjax.compress._training.layers import Layers
from memjax.compress._transform.array_codecs import ArrayCodecs, array_codecs
from memjax.compress._transform.differentiable import call_compressed
from memjax.compress._transform.keep.costs import SMALL, Which
from memjax.compress._transform.modules import compressed_linen_class, compressed_linen_module, compressed_nnx_module

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

    Values are those of the original, gradients are computed from decoded arrays. Variables, their names and the module's
    signature do not change: a checkpoint of one loads in the other. Without a codec an array gets one that suits it, of `bits`
    per value, for any finite values, that cannot overflow. What `jax.vjp` saves is encoded, kept, or computed again from what
    is; parameters, and what has to agree with something else, are exact. The guide "Compressed activations" lists it, section
    "What is kept".

    Memory between forward and backward: the sum of `codec.nbytes` over the encoded arrays, and the bytes of the arrays that are
    kept as they are. The backward pass besides holds one decoded array at a time, and up to three outputs of residual blocks
    that are computed again at once.

    Reverse mode, once. Works under and around `jit`, `vmap`, `jax.checkpoint`, `jax.lax.scan`, `memjax.remat.scan` and
    `shard_map`, inside which each device encodes its own part. Source: Jin et al. 2020, section 3.

    An optimizer of optax comes back as one whose state is in codes between steps, of 8 or 4 bits for each value of a moment;
    `codec`, `sigma` and `inputs` do not apply. The guide "Optimizer state" says what is encoded, and how exactly.

    Args:
      f_or_module: a function of pytrees of arrays (other leaves are static), or an NNX or Linen module, or a class of Linen
        modules, whose calls are compressed and other public methods, too; or an `optax.GradientTransformation`.
      codec: one for all arrays, such as `memjax.compress.ErrorBounded(2**-7, bits_per_value=9)`; or `memjax.compress.layers`,
        with a bound for each array that training adapts.
      bits: bits per value without a codec: 8, 6, 4 or 3; 8 if left out. What convolutions and batch norms read has 8 or 4. Or
        bits for each array: what `memjax.compress.fit_bits` found.
      sigma: in place of bits: by how much gradients may be off, such as 0.01, if arrays and cotangents are independent and
        normally distributed. `memjax.compress.fit_bits` measures it instead.
      where: what to encode; None: all that may be. "conv": what convolutions read, to which Jin et al. confine themselves. A
        pattern (`fnmatch`) for paths of submodules or parts of them, "encoder/*" or "Conv_*", or a predicate `where(path, x)`.
        For functions and Linen modules paths are `jax.named_scope`s in which an array is read (or made, if the forward pass does
        not read it), and x is its type; for NNX modules paths of submodules, and x the submodule, each of which is then
        compressed by itself. For optimizers paths in the state, "0/mu/layers/kernel", and x an array of it.
      inputs: which arguments of a function are activations, to be encoded like what is computed of them: their positions or
        names, one or several (`inputs=1` for `f(params, x)`), True for all, False for none, since a caller mostly keeps
        them anyway. A module's arguments, except its variables, are always activations.
      smallest: number of values below which an array is not encoded; at least 4096. A GPU takes a certain time for any code.

    Raises:
      TypeError: no function or module, or no codec; forward mode or second derivatives.
      ValueError: `bits` is none of these, or those of another number of arrays; `sigma` is not positive; two of `codec`, `bits`
        and `sigma` are given; `smallest` is negative; `inputs` names no argument; `where` matches nothing, for functions and
        Linen modules when called or differentiated.
    """
    if isinstance(f_or_module, optax.GradientTransformation):
        return _optimizer(f_or_module, codec, bits, sigma, where, inputs, smallest)
    codecs = array_codecs(codec, bits, sigma)
    which = Which(_checked(where), _smallest(smallest))
    return _compressed(f_or_module, inputs, codecs, which)


def _checked(where: Any) -> Any:
    if where == "" or not (where is None or isinstance(where, str) or callable(where)):
        raise check.fail(TypeError, "where", '"conv", a pattern, a predicate or None', where)
    if callable(where):
        check.function("where", where, "where(scope, type) says whether to encode what is read there", arguments=2)
    return where


def _smallest(smallest: int) -> int:
    return max(check.integer("smallest", smallest, least=0, what="a number of values"), SMALL)


def _optimizer(tx: Any, codec: Any, bits: Any, sigma: Any, where: Any, inputs: Any, smallest: int) -> Any:
    for name, value in (("codec", codec), ("sigma", sigma)):
        if value is not None:
            raise check.fail(ValueError, name, "left out for an optimizer", value, "bits=8 or bits=4 chooses its codes")
    if inputs is not False:
        raise check.fail(ValueError, "inputs", "left out for an optimizer", inputs, "it has no activations")
    if _checked(where) == "conv":
        raise check.fail(ValueError, "where", "a pattern for paths in the state", where, 'such as "mu/*" or "kernel"')
    wanted = (lambda path, x: where is None or matches(path, where)) if not callable(where) else where
    return coded_optimizer(tx, bits, where, wanted, _smallest(smallest))


def _compressed(f: Any, inputs: Any, codecs: ArrayCodecs, which: Which) -> Any:
    is_linen_class = isinstance(f, type) and issubclass(f, nn.Module)
    if (is_linen_class or isinstance(f, nnx.Module | nn.Module)) and inputs is not False:
        raise check.fail(ValueError, "inputs", "left out for a module", inputs, "its arguments are always activations")
    if isinstance(f, nnx.Module):
        return compressed_nnx_module(f, codecs, which)
    if isinstance(f, nn.Module):
        return compressed_linen_module(f, codecs, which)
    if is_linen_class:
        return compressed_linen_class(f, codecs, which)
    if isinstance(f, type) or not callable(f):
        fix = "make an instance first" if isinstance(f, type) else ""
        raise check.fail(TypeError, "f_or_module", "a function or a Flax module", f, fix)
    named = _activations(f, inputs)

    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        chosen = named(args, kwargs)

        def call(lasting, passing):
            return with_changes(f, *_joined(lasting, passing, chosen))

        out, changes = call_compressed(call, *_split(args, kwargs, chosen), user=f, codecs=codecs, which=which)
        put_changes(objects_in((args, kwargs)), changes)
        return out

    return wrapped


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
