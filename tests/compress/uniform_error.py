"""The model of errors of Jin et al. 2020, section 3, as a codec."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from memjax import compressed


@dataclasses.dataclass(frozen=True)
class UniformError:
    """Saves no memory: adds to each value that is not zero an error, uniform in [-bound, bound]."""

    bound: float
    seed: Any = 0

    def encode(self, x):
        checksum = jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)
        key = jax.random.fold_in(jax.random.key(self.seed), checksum)  # different arrays get different errors
        error = jax.random.uniform(key, x.shape, x.dtype, -self.bound, self.bound)
        return jnp.where(x == 0, x, x + error)

    def decode(self, code):
        return code

    def nbytes(self, aval):
        return aval.size * aval.dtype.itemsize


def inject_error(f, bound, *, seed=0):
    """The function, with errors in what convolutions read."""
    return compressed(f, UniformError(bound, seed), where="conv", inputs=True)
