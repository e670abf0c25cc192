"""What the tests of rings share."""

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec


def mesh(size):
    return jax.make_mesh((size,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def sharded(f, size, in_specs, out_specs):
    return jax.jit(eagerly_sharded(f, size, in_specs, out_specs))


def eagerly_sharded(f, size, in_specs, out_specs):
    return jax.shard_map(f, mesh=mesh(size), in_specs=in_specs, out_specs=out_specs)


ROWS = PartitionSpec(None, "ring")  # of (batch, tokens, ...), and columns of a matrix
FIRST = PartitionSpec("ring")


def normal(*shapes, seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    return jax.device_put([np.asarray(random.normal(size=shape), dtype) for shape in shapes])


def outputs_and_gradients(f, cotangent, *args):
    """The value, and the gradients in all arguments for the cotangent."""

    @jax.jit
    def both(cotangent, *args):
        value, pull = jax.vjp(f, *args)
        return value, *pull(cotangent)

    return both(cotangent, *args)
