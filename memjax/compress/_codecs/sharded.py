"""Codes of arrays that may be sharded over the axes of a mesh: each device encodes its own part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from memjax._core.compat import is_tracer, mesh_axes
from memjax._core.meshes import names_in


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedCode:
    """The codes of the parts of an array, stacked along a leading axis that is sharded as the array is.

    Attributes:
      parts: the code of a part; every leaf has that leading axis.
      spec: how the array is sharded, or with automatic axes how it is taken to be sharded.
    """

    parts: Any
    spec: P = dataclasses.field(metadata={"static": True})

    @property
    def overflowed(self) -> Bool[Array, ""]:
        """Whether a part lost values because the capacity did not suffice."""
        return jnp.any(self._of_parts("overflowed"))

    @property
    def needed_bits_per_value(self) -> Float[Array, ""]:
        """The least `bits_per_value` with which no part would have lost any."""
        return jnp.max(self._of_parts("needed_bits_per_value"))

    @property
    def needed_nbytes(self) -> Float[Array, ""]:
        """Bytes of all parts, headers included, capacity that is not needed left out."""
        return jnp.sum(self._of_parts("needed_nbytes"))

    @property
    def raw_share(self) -> Float[Array, ""]:
        """Share of the lanes stored as they are."""
        return jnp.mean(self._of_parts("raw_share"))

    def _of_parts(self, name: str) -> Array:
        return jax.vmap(lambda part: getattr(part, name))(self.parts)


def encode_parts(encode: Callable[[Any, Any], Any], x: Array, setting: Any, *, automatic: bool = False) -> Any:
    """`encode(x, setting)`, on each device for its part of `x`. A setting with an axis has an entry for each channel.

    Args:
      automatic: whether a device also takes a part of its own where axes of the mesh are automatic. The compiler decides how `x`
        lies there, after this: parts are taken along the first axis, so that examples stay where they are. For codecs whose
        arithmetic the compiler cannot divide.
    """
    spec = P(*jax.typeof(x).sharding.spec)
    if automatic and not names_in(spec):
        spec = _automatic_spec(x)
    axes = names_in(spec)
    if not axes:
        return encode(x, setting)
    setting = jnp.asarray(setting)
    setting_spec = P(spec[-1]) if setting.ndim and len(spec) == x.ndim else P()
    stacked = lambda x, setting: jax.tree.map(lambda leaf: leaf[None], encode(x, setting))
    mesh = _mesh_of(x)
    if mesh.explicit_axes:
        setting = jax.sharding.reshard(setting, NamedSharding(mesh, setting_spec))
    on_each = jax.shard_map(stacked, mesh=mesh, in_specs=(spec, setting_spec), out_specs=P(axes), axis_names={*axes})
    return ShardedCode(on_each(x, setting), spec)


def decode_parts(decode: Callable[[Any], Array], code: Any) -> Array:
    """`decode(code)`, on each device for its part of a `ShardedCode`."""
    if not isinstance(code, ShardedCode):
        return decode(code)
    axes = names_in(code.spec)
    mesh = _mesh_of(jax.tree.leaves(code.parts)[0])
    if mesh.empty:  # parts along the first axis, of a mesh that is not known any more
        decoded = jax.vmap(decode)(code.parts)
        return decoded.reshape(-1, *decoded.shape[2:])
    alone = lambda parts: decode(jax.tree.map(lambda leaf: leaf[0], parts))
    return jax.shard_map(alone, mesh=mesh, in_specs=P(axes), out_specs=code.spec, axis_names={*axes})(code.parts)


def _automatic_spec(x: Array) -> P:
    """Parts along the first axis, over as many automatic axes of the mesh as divide it."""
    sizes, automatic = mesh_axes(jax.typeof(x))
    if not is_tracer(x) or not x.ndim:
        return P()
    axes, count = [], 1
    for name, size in sizes.items():
        if name in automatic and x.shape[0] and x.shape[0] % (count * size) == 0:
            axes.append(name)
            count *= size
    return P(tuple(axes)) if count > 1 else P()


def _mesh_of(x: Array) -> Any:
    """The mesh of a sharded array. There need not be a surrounding `jax.set_mesh`."""
    known: Any = jax.typeof(x) if is_tracer(x) else x
    mesh = getattr(getattr(known, "sharding", None), "mesh", None)  # arrays on one device have none
    return jax.sharding.get_abstract_mesh() if mesh is None or mesh.empty else mesh
