"""Types of arrays: what carries a gradient, what sums are kept in, and over which mesh axes values differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax._core.compat import explicit_sharding, varying


def is_float(aval: Any) -> bool:
    """Whether the type carries a gradient."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def strong(aval: Any) -> Any:
    """The type without weakness, which says nothing about an array."""
    return aval.update(weak_type=False)


def anywhere(value: Any) -> Any:
    """The type, or that of an array, without an automatic mesh, which says nothing of where an array lies. Other meshes stay."""
    # A jax.ShapeDtypeStruct is no type of JAX, and serves as one.
    is_type = hasattr(value, "update") and not isinstance(value, jax.Array)
    aval = value if is_type else jax.typeof(value)
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    is_automatic = mesh is not None and set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    return aval.update(sharding=None) if is_automatic else aval


def is_on_host(aval: Any) -> bool:
    """Whether values of this type lie in the memory of the host."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def as_array(value: Any) -> Array:
    """The value as a JAX array. An array of JAX is not copied, as `jnp.asarray` copies it outside of `jit`."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def accumulator(dtype: Any) -> Any:
    """The dtype of sums and of row statistics: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def zeros(aval: Any, leading: tuple[int, ...] = ()) -> Any:
    """Zeros of a type, with leading dimensions: sharded as the type says, and varying over the same mesh axes."""
    return filled(jnp.zeros((), aval.dtype), aval, leading)


def filled(value: Any, aval: Any, leading: tuple[int, ...] = ()) -> Any:
    """A number at all places of an array of a type, with leading dimensions: sharded and varying as the type says."""
    shape, sharding = (*leading, *aval.shape), explicit_sharding(aval, len(leading))
    if shape:
        value = lax.broadcast_in_dim(value, shape, (), out_sharding=sharding)
    return vary(value, varying(aval))


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Mesh axes over which any of the arrays differs, inside a `shard_map` that tracks it."""
    return frozenset().union(*(varying(jax.typeof(a)) for a in arrays))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The values, typed as differing over `axes`. The transpose sums cotangents over the axes that were added."""

    def one(a: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(a)))
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(one, tree)
