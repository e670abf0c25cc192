"""Parts of an axis that may be sharded, such that every device has its share of each part.

A contiguous part of a sharded axis lies on one device or a few; the others would idle or repeat the work. So the axis
is split into equal segments, one per device or a multiple of that, where its length allows it. A part takes the same
positions of every segment, so each device cuts it from its own shard. This is valid only where positions do not mix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from memjax._core.compat import explicit_sharding, mesh_axes
from memjax._core.meshes import parts_by


class Segments(NamedTuple):
    """An axis of `length` positions as `count` segments. A part has the same positions of each."""

    length: int
    count: int  # type: ignore[assignment]

    def split(self, array: Any, axis: int) -> Any:
        """The array with the axis replaced by two: one for segments, and one for the positions in them."""
        if self.count == 1:
            return array
        shape = array.shape
        return array.reshape(*shape[:axis], self.count, self.length // self.count, *shape[axis + 1 :])

    def join(self, array: Any, axis: int) -> Any:
        """The inverse of `split`. It also applies to a part."""
        if self.count == 1:
            return array
        shape = array.shape
        return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])

    def cut(self, split: Any, start: Any, size: int, axis: int) -> Any:
        """A part of an array that was split, joined."""
        within = axis + (self.count > 1)
        return self.join(lax.dynamic_slice_in_dim(split, start, size, within), axis)

    def put(self, split: Any, part: Any, start: Any, axis: int) -> Any:
        """The array that was split with a joined part written into it."""
        part, within = part.astype(split.dtype), axis
        if self.count > 1:
            shape, within = part.shape, axis + 1
            part = part.reshape(*shape[:axis], self.count, shape[axis] // self.count, *shape[axis + 1 :])
        return lax.dynamic_update_slice_in_dim(split, part, start, within)


def segments(length: int, arrays: Sequence[Any], axes: Sequence[int], size: int) -> tuple[Segments, int]:
    """The `Segments` of the axis that `arrays` share, and `size` for a part.

    `size` is rounded down to a multiple of the number of segments, but is at least that number.
    """
    count = segment_count(length, arrays, axes)
    return Segments(length, count), max(size // count, 1) * count


def segment_count(length: int, arrays: Sequence[Any], axes: Sequence[int]) -> int:
    """A divisor of `length`: as many segments as devices over which an array shards its axis, or a multiple.

    On a mesh of explicit axes, types state how many there are. With automatic axes they state the mesh at most; where
    arrays get to a mesh by `in_shardings` alone, not even that. Then there is one segment: on one device several cost
    a copy of what is written.
    """
    types = list(map(jax.typeof, arrays))
    explicit = math.lcm(*(shards(aval, axis) for aval, axis in zip(types, axes, strict=True)))
    return math.gcd(length, explicit * (automatic_devices(types) or 1))


def automatic_devices(types: Sequence[Any]) -> int | None:
    """Over how many devices of a mesh the compiler may spread values of these types as it likes. None: no mesh is known."""
    meshes = [mesh_axes(aval) for aval in types]
    known = [math.prod(sizes[name] for name in automatic) for sizes, automatic in meshes if sizes]
    return max(known, default=None)


def shards(aval: Any, axis: int) -> int:
    """Over how many devices of a mesh of explicit axes the type shards an axis."""
    sharding = explicit_sharding(aval)
    if sharding is None:
        return 1
    return parts_by(sharding.mesh, sharding.spec[axis : axis + 1])


def whole(array: Any, axis: int) -> Any:
    """The array, gathered along an axis where a mesh of explicit axes shards it. Its gradient is scattered again."""
    if shards(jax.typeof(array), axis) == 1:
        return array
    sharding = jax.typeof(array).sharding
    spec = (None if i == axis else entry for i, entry in enumerate(sharding.spec))
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*spec)))
