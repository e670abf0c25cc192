"""Encoding, decoding and random numbers as one equation each, so that whoever traces an update can see them.

Only `_state.regions` traces so. It runs these equations by the functions that are here, or puts them into a kernel. Elsewhere
the functions are plain `jax.numpy`, which compilers, `jax.vmap` and others know.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jaxtyping import Array, Float, UInt32

from memjax.compress._codecs.bits import places
from memjax.compress._state import minifloat, noise
from memjax.compress._state.minifloat import Coded

_seen = contextvars.ContextVar("operations are equations", default=False)


@contextlib.contextmanager
def as_equations() -> Iterator[None]:
    """What is traced inside has an equation for each operation of this file."""
    token = _seen.set(True)
    try:
        yield
    finally:
        _seen.reset(token)


def are_equations() -> bool:
    return _seen.get()


def encode(x: Float[Array, "..."], seed: UInt32[Array, ""], *, bits: int, signed: bool) -> Coded:
    """The code of an array with an axis of 32 values or more. `seed` chooses how values are rounded: see `noise`."""
    codes, exponents = _run(ENCODE, x, seed, bits=bits, signed=signed)
    return Coded(codes, exponents, x.shape, jnp.dtype(x.dtype), bits, signed)


def decode(code: Coded) -> Float[Array, "..."]:
    """See `minifloat.decode`."""
    about = {"shape": code.shape, "dtype": code.dtype, "bits": code.bits, "signed": code.signed}
    return _run(DECODE, code.codes, code.exponents, **about)[0]


def random_bits(shape: tuple[int, ...], seed: UInt32[Array, ""], purpose: int) -> UInt32[Array, "..."]:
    """See `noise.at`, for all places of an array."""
    return _run(NOISE, seed, shape=shape, purpose=purpose)[0]


def run(primitive: Any, *args: Any, **params: Any) -> Any:
    """What an equation of such a primitive makes, a sequence."""
    return _FUNCTIONS[primitive](*args, **params)


def _run(primitive: Any, *args: Any, **params: Any) -> Any:
    return primitive.bind(*args, **params) if are_equations() else run(primitive, *args, **params)


def _decoded(codes: Any, exponents: Any, **about: Any) -> Any:
    return [minifloat.decode(Coded(codes, exponents, **about))]


def _random(seed: Any, *, shape: tuple[int, ...], purpose: int) -> Any:
    return [noise.at(places(shape), seed, purpose)]


def _primitive(name: str, function: Callable[..., Any]) -> Any:
    primitive: Any = Primitive(f"memjax_state_{name}")
    primitive.multiple_results = True

    def types(*avals: Any, **params: Any) -> list[Any]:
        args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        outs = jax.eval_shape(lambda *args: list(function(*args, **params)), *args)
        return [ShapedArray(out.shape, out.dtype) for out in outs]

    primitive.def_abstract_eval(types)
    return primitive


ENCODE, DECODE, NOISE = (
    _primitive(name, function)
    for name, function in (("encode", minifloat.encode), ("decode", _decoded), ("noise", _random))
)
_FUNCTIONS: dict[Any, Callable[..., Any]] = {ENCODE: minifloat.encode, DECODE: _decoded, NOISE: _random}
OPERATIONS = (ENCODE, DECODE, NOISE)
