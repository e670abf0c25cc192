"""Codes of arrays that may be sharded over explicit mesh axes: each device encodes its own part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from memjax._core.compat import is_tracer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedCode:
    """The codes of the parts of an array, stacked along a leading axis that is sharded as the array is.

    Attributes:
      parts: the code of a part; every leaf has that leading axis.
      spec: how the array is sharded.
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


def encode_parts(encode: Callable[[Any, Any], Any], x: Array, setting: Any) -> Any:
    """`encode(x, setting)`, on each device for its part of `x`. A setting with an axis has an entry for each channel."""
    spec = P(*jax.typeof(x).sharding.spec)
    axes = _axes(spec)
    if not axes:
        return encode(x, setting)
    setting = jnp.asarray(setting)
    setting_spec = P(spec[-1]) if setting.ndim else P()
    stacked = lambda x, setting: jax.tree.map(lambda leaf: leaf[None], encode(x, setting))
    mesh = _mesh_of(x)
    on_each = jax.shard_map(stacked, mesh=mesh, in_specs=(spec, setting_spec), out_specs=P(axes), axis_names={*axes})
    return ShardedCode(on_each(x, jax.sharding.reshard(setting, NamedSharding(mesh, setting_spec))), spec)


def decode_parts(decode: Callable[[Any], Array], code: Any) -> Array:
    """`decode(code)`, on each device for its part of a `ShardedCode`."""
    if not isinstance(code, ShardedCode):
        return decode(code)
    alone = lambda parts: decode(jax.tree.map(lambda leaf: leaf[0], parts))
    axes = _axes(code.spec)
    mesh = _mesh_of(jax.tree.leaves(code.parts)[0])
    return jax.shard_map(alone, mesh=mesh, in_specs=P(axes), out_specs=code.spec, axis_names={*axes})(code.parts)


def _mesh_of(x: Array) -> Any:
    """The mesh of a sharded array. There need not be a surrounding `jax.set_mesh`."""
    known: Any = jax.typeof(x) if is_tracer(x) else x
    return known.sharding.mesh


def _axes(spec: P) -> tuple[str, ...]:
    """The names of all mesh axes in `spec`."""
    return tuple(
        name for entry in spec if entry is not None for name in ((entry,) if isinstance(entry, str) else entry)
    )
