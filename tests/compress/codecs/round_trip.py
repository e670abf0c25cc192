"""A round trip through a codec, one program for each codec and shape, and values that take no program to make."""

import functools

import jax
import numpy as np


@functools.partial(jax.jit, static_argnums=0)
def round_trip(codec, x):
    return codec.decode(codec.encode(x))


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def uniform(*shape, seed=0, dtype=np.float32):
    """Between 0 and 1."""
    return np.random.default_rng(seed).random(shape).astype(dtype)
