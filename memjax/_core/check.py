"""Checks of arguments, so that every package words its errors alike: "name must be ..., got ...: fix"."""

import difflib
import functools
import inspect
import json
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memjax._core.arrays import as_array
from memjax._core.compat import is_tracer, varying

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_NO_NUMBERS = "OSUMm"  # kinds of NumPy's dtypes: objects, texts and dates
_SHARE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*")
_BYTES = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def shown(value: Any) -> str:
    """`value` as an error message shows it: short, with its type where the value alone may mislead."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of {value.dtype}{list(value.shape)}"
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"the type {value.dtype}{list(value.shape)} of an array"
    if isinstance(value, functools.partial):
        return f"a functools.partial of {shown(value.func)}"
    text = repr(value) if isinstance(value, str) else " ".join(repr(value).split())
    if len(text) > 100:
        text = f"{text[:97]}..."
    return (
        text
        if value is None or isinstance(value, type | str | int | float | complex)
        else f"{text} ({type(value).__name__})"
    )


def fail(kind: type[Exception], name: str, wanted: str, value: Any, fix: str = "") -> Exception:
    """The exception to raise: "name must be `wanted`, got `value`: fix"."""
    return kind(f"{name} must be {wanted}, got {shown(value)}" + (f": {fix}" if fix else ""))


def function(name: str, value: Any, fix: str = "", *, arguments: int | None = None) -> Callable[..., Any]:
    """A function, or an instance of a Flax module; with `arguments`, one that takes so many positional arguments."""
    if not callable(value):
        raise fail(TypeError, name, "a function", value, fix)
    if isinstance(value, type) and issubclass(value, nn.Module | nnx.Module):
        raise fail(TypeError, name, "a function or a module", value, "make an instance first")
    if arguments is not None and not _takes(value, arguments):
        raise fail(TypeError, name, f"a function of {arguments} arguments", value, fix)
    return value


def _takes(f: Callable[..., Any], arguments: int) -> bool:
    try:
        inspect.signature(f).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        return True
    return True


def dtype(name: str, value: Any, *, floating: bool = False, fix: str = "pass jnp.float32, for example") -> Any:
    """A dtype of numbers from what NumPy takes for one. None and arrays are refused."""
    try:
        known = None if value is None or is_array(value) else jnp.dtype(value)
    except TypeError:
        known = None
    if known is None or known.kind in _NO_NUMBERS or (floating and not jnp.issubdtype(known, jnp.floating)):
        raise fail(TypeError, name, "a floating-point dtype" if floating else "a dtype", value, fix)
    return known


def compiler_options(value: Any) -> None:
    fix = "pass what memjax.remat_compiler_options() gives, for example"
    wanted = "None or a dict of names and values (text, bool, int or float)"
    if value is not None and not isinstance(value, Mapping):
        raise fail(TypeError, "compiler_options", wanted, value, fix)
    if any(not isinstance(k, str) or not isinstance(v, str | int | float) for k, v in (value or {}).items()):
        raise fail(TypeError, "compiler_options", wanted, value, fix)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise fail(TypeError, name, "True or False", value)
    return bool(value)


def choice(name: str, value: Any, options: Sequence[Any]) -> Any:
    """One of a few strings, or None where that is among `options`."""
    if not any(value is option or (isinstance(value, str) and value == option) for option in options):
        words = [option for option in options if isinstance(option, str)]
        near = difflib.get_close_matches(value.lower(), words, 1) if isinstance(value, str) else []
        fix = f"did you mean {near[0]!r}?" if near else ""
        raise fail(ValueError, name, f"one of {', '.join(map(repr, options))}", value, fix)
    return value


def names(name: str, value: Any, options: Sequence[str]) -> None:
    """A sequence of a few strings."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        near = difflib.get_close_matches(value.lower(), options, 1) if isinstance(value, str) else []
        raise fail(TypeError, name, "a sequence of names", value, f'such as ("{(near or options)[0]}",)')
    for one in value:
        choice(name, one, options)


def integer(name: str, value: Any, *, least: int | None = None, what: str = "an integer", fix: str = "") -> int:
    """A Python int from anything that is a concrete integer (NumPy's included), booleans left out."""
    wanted = what if least is None else f"{what} of at least {least}"
    if is_tracer(value):
        raise fail(TypeError, name, f"{what} known when tracing", value, fix or "mark it static, or close over it")
    if isinstance(value, bool | np.bool_):
        raise fail(TypeError, name, wanted, value, fix)
    try:
        whole = operator.index(value)
    except TypeError:
        raise fail(TypeError, name, wanted, value, fix) from None
    if least is not None and whole < least:
        raise fail(ValueError, name, wanted, value, fix)
    return whole


def argnums(value: Any, count: int) -> list[int]:
    """Positions among `count` arguments from one or several, counted from the start."""
    found = []
    for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        position = integer("argnums", one, what="positions of arguments")
        if not -count <= position < count:
            raise fail(ValueError, "argnums", f"positions among {count} arguments", value)
        found.append(position % count)
    return found


def number(
    name: str,
    value: Any,
    *,
    positive: bool = False,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    fix: str = "",
) -> float:
    """A finite Python float from a concrete real number, booleans left out."""
    wanted = "a positive finite number" if positive else "a finite number"
    if (least, most, below) != (None, None, None):
        end = f"{most}]" if most is not None else f"{'inf' if below is None else below})"
        wanted += f" in [{'-inf' if least is None else least}, {end}"
    if is_tracer(value):
        raise fail(TypeError, name, f"{wanted} known when tracing", value, fix)
    concrete = isinstance(value, jax.Array | np.ndarray) and value.shape == ()
    if isinstance(value, bool | np.bool_) or not (isinstance(value, numbers.Real) or concrete):
        raise fail(TypeError, name, wanted, value, fix)
    real = _as_float(value)
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    if (
        not math.isfinite(real)
        or (positive and real <= 0)
        or not low <= real <= high
        or (below is not None and real >= below)
    ):
        raise fail(ValueError, name, wanted, value, fix)
    return real


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of a large Python integer
        return math.inf


def is_array(value: Any) -> bool:
    """Whether `value` is an array of JAX, or one of NumPy that is not of objects, texts or dates."""
    return isinstance(value, jax.Array) or (
        isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in _NO_NUMBERS
    )


def is_number_or_array(value: Any) -> bool:
    """Whether JAX takes `value` for an array."""
    return isinstance(value, bool | int | float | complex) or is_array(value)


def array(name: str, value: Any, *, ndim: int | None = None, floating: bool = False, fix: str = "") -> Any:
    """An array of JAX or NumPy, as it is."""
    if not is_array(value):
        raise fail(TypeError, name, "an array", value, fix or "pass jnp.asarray(...) of numbers")
    if floating and not jnp.issubdtype(value.dtype, jnp.floating):
        raise fail(TypeError, name, "a floating-point array", value, fix or "convert it with .astype")
    if ndim is not None and np.ndim(value) != ndim:
        raise fail(ValueError, name, f"an array of {ndim} dimensions", value, fix)
    return value


def arrays(name: str, tree: Any) -> Any:
    """A pytree of arrays and numbers with all of its leaves as JAX arrays; `jax.ShapeDtypeStruct`s stay."""

    def convert(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        where = f"{name}{jax.tree_util.keystr(path)}"
        if not is_number_or_array(leaf):
            raise fail(TypeError, where, "an array or a number", leaf, "close over what is no array")
        try:
            return as_array(leaf)
        except OverflowError:
            raise fail(ValueError, where, "a number that an array can hold", leaf) from None

    return jax.tree_util.tree_map_with_path(convert, tree)


def exactly_one(**options: Any) -> None:
    """Raises unless one of these options is not None, and only one."""
    if sum(value is not None for value in options.values()) != 1:
        values = " and ".join(f"{name}={shown(value)}" for name, value in options.items())
        raise ValueError(f"give exactly one of {' and '.join(options)}, got {values}")


def json_fields(kind: str, text: Any, names: Sequence[str]) -> dict[str, Any]:
    """The fields of a dataclass from the JSON that its `to_json` wrote."""
    try:
        fields = json.loads(text)
    except (TypeError, ValueError):
        fields = None
    if not isinstance(fields, dict) or set(fields) != set(names):
        raise fail(ValueError, "text", f"what {kind}.to_json wrote", text)
    return fields


def lists(kind: str, text: Any, fields: Mapping[str, Any], names: Sequence[str]) -> None:
    """That these fields of what was read from `text`, what `kind.to_json` wrote, are lists."""
    for name in names:
        if not isinstance(fields[name], list):
            raise fail(
                ValueError, "text", f"what {kind}.to_json wrote", text, f"{name} is {shown(fields[name])}, no list"
            )


def path(name: str, value: Any) -> Any:
    """The path of a file, or an open file of bytes, as it is."""
    if not (isinstance(value, str | os.PathLike) or hasattr(value, "write")):
        raise fail(TypeError, name, "a path or an open file", value)
    return value


def axes(value: Any) -> None:
    """That `ax` is None or axes of matplotlib."""
    if value is not None and not hasattr(value, "plot"):
        raise fail(TypeError, "ax", "None or axes of matplotlib", value, "matplotlib.pyplot.subplots() makes some")


def prng_key(name: str, value: Any) -> Any:
    """One random key of JAX, typed or of the old kind, as it is."""
    ndim = -1
    if isinstance(value, jax.Array):
        typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        ndim = value.ndim if typed else value.ndim - 1 if value.dtype == jnp.uint32 else -1
    if ndim:
        raise fail(TypeError, name, "one random key", value, "jax.random.key(seed) makes one")
    return value


def heads(dim: Any, heads: Any, kv_heads: Any, head_dim: Any) -> tuple[int, int, int, int]:
    """The sizes of an attention layer, where None stands for as many key-value heads as heads, and for dim / heads."""
    dim, heads = integer("dim", dim, least=1), integer("heads", heads, least=1)
    kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, least=1)
    if heads % kv_heads:
        raise fail(ValueError, "kv_heads", f"a divisor of heads = {heads}", kv_heads)
    if head_dim is None and dim % heads:
        raise fail(ValueError, "heads", f"a divisor of dim = {dim}", heads, "or pass head_dim")
    return dim, heads, kv_heads, dim // heads if head_dim is None else integer("head_dim", head_dim, least=1)


def axis_size(name: str, value: Any) -> int:
    """The number of devices along a mesh axis that a surrounding `jax.shard_map` has made manual."""
    if not isinstance(value, str) or not value:
        raise fail(TypeError, name, "the name of one mesh axis", value)
    try:
        return jax.lax.axis_size(value)
    except NameError:
        raise ValueError(
            f"{name} must be an axis of the mesh of a surrounding jax.shard_map, got {value!r}: "
            "call this inside jax.shard_map over a mesh with that axis"
        ) from None


def sharded(name: str, value: Any, axis_name: str, along: str = "") -> None:
    """Raises if JAX knows that `value` is the same on all devices of the axis. With `check_vma=False` it does not know.

    Neither does it know which dimension of `value` is spread over the axis: `along` says in the error which one should be.
    """
    local(name, value)
    size = jax.lax.axis_size(axis_name)
    tracked = axis_name in varying(jax.typeof(jax.lax.axis_index(axis_name)))
    if size > 1 and tracked and axis_name not in varying(jax.typeof(value)):
        where = f" along {along}" if along else ""
        raise ValueError(
            f"{name} must be sharded over the mesh axis {axis_name!r}{where}, got {shown(value)} that is the same on all"
            f" of its {size} devices: give it a PartitionSpec with {axis_name!r} in the in_specs of jax.shard_map, or where equal"
            f" parts are meant jax.lax.pcast({name}, {axis_name!r}, to='varying')"
        )


def same(name: str, value: Any, axis_name: str) -> None:
    """Raises if the type of `value` varies over the mesh axis. With `check_vma=False` no type does."""
    if is_array(value) and axis_name in varying(jax.typeof(value)):
        raise ValueError(
            f"{name} must be the same on all devices of the mesh axis {axis_name!r}, got {shown(value)} that JAX takes to"
            f" differ between them: give it a PartitionSpec without {axis_name!r} in the in_specs of jax.shard_map, or gather"
            f" it with jax.lax.all_gather({name}, {axis_name!r}, tiled=True, to='invarying')"
        )


def local(name: str, value: Any) -> None:
    """Raises if an axis of an explicit mesh, which a surrounding `jax.shard_map` has left out, still shards `value`."""
    axes = [axis for axis in jax.typeof(value).sharding.spec if axis is not None]
    if axes:
        raise ValueError(
            f"{name} must be this device's own array, got {shown(value)} that the explicit mesh axes {axes} shard: make"
            " these axes manual too, with the axis_names of jax.shard_map"
        )


def known_sizes(name: str, tree: Any) -> None:
    """Raises if the size of an array is a symbol of `jax.export`. The transform `name` decides by sizes."""
    for leaf in jax.tree.leaves(tree):
        if any(jax.export.is_symbolic_dim(size) for size in getattr(leaf, "shape", ())):
            raise ValueError(
                f"arguments of memjax.{name} must be arrays of known sizes, got {jax.typeof(leaf).str_short()} with a symbolic "
                "size: what is kept, and in which parts, is decided by sizes; export the program once for each size"
            )


def byte_count(name: str, value: Any, *, words: Sequence[str] = (), shares: bool = False) -> Any:
    """Bytes from a number or a text like "64MiB", "1.5 GB" or "12G" (2^30 bytes), or one of `words` as it is.

    With `shares` also a text like "50%", as it is: `share_of` reads it.
    """
    also = "".join(f", or {word!r}" for word in [*words, *["50%"] * shares])
    wanted = f'a number of bytes or a text like "64MiB", "1.5GB" or "12G"{also}'
    if isinstance(value, str):
        if value in words:
            return value
        if shares and (share := share_of(value)) is not None:
            if not 0 < share <= 1:
                raise fail(ValueError, name, f"{wanted}; of a share more than 0% and at most 100%", value)
            return value
        match = _BYTES.fullmatch(value)
        if match is not None and not match[2]:  # percent, GiB or bytes may be meant
            digits = match[1]
            percent = f", '{digits}%'" * shares
            fix = f"give '{digits}GiB'{percent} or, for bytes, '{digits}B' (in Python also the number {digits})"
            raise fail(ValueError, name, wanted, value, fix)
        if match is None or match[2].lower() not in _UNITS:
            raise fail(ValueError, name, wanted, value)
        count = float(match[1]) * _UNITS[match[2].lower()]
        if count >= 2**63 or count < 1:
            raise fail(ValueError, name, f"{wanted}, from 1 byte to 8 EiB", value)
        return int(count)
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise fail(TypeError, name, wanted, value)
    count = _as_float(value)
    if not math.isfinite(count) or count < 0 or count >= 2**63 or count != int(count):
        raise fail(ValueError, name, f"{wanted}; whole, finite and not negative", value)
    return int(count)


def share_of(text: Any) -> float | None:
    """0.5 for "50%"; None for what is no such text."""
    match = _SHARE.fullmatch(text) if isinstance(text, str) else None
    return None if match is None else float(match[1]) / 100


def readable_bytes(count: float, *, up: bool = False) -> str:
    """A number of bytes as people read it: "1.50 MiB", "312 B". Rounded up it is a budget that has room for them."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    if up:
        count = math.ceil(100 * count) / 100
    return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
