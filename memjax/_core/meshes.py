"""Arrays on meshes: where an argument lies, and into how many parts it is divided."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from memjax._core.compat import HOST
from memjax._core.lists import drop, pick


def own_sharding(value: Any) -> Any:
    """The sharding of an argument; None for an array that `jax.jit` would move to the others."""
    return getattr(value, "sharding", None) if getattr(value, "committed", True) else None


def is_in_host_memory(sharding: Any) -> bool:
    """Whether arrays lie in the memory of the host, which JAX moves to a device where a step says so."""
    return getattr(sharding, "memory_kind", None) == HOST


def parts(sharding: Any, but: Collection[str] = ()) -> int:
    """Into how many parts an array is divided over devices, along all axes but these."""
    return parts_by(sharding.mesh, sharding.spec, but) if isinstance(sharding, NamedSharding) else 1


def parts_by(mesh: Any, spec: Any, but: Collection[str] = ()) -> int:
    """Into how many parts a `PartitionSpec` divides an array over a mesh, along all axes but these."""
    return math.prod(mesh.shape[name] for name in names_in(spec) if name in mesh.shape and name not in but)


def names_in(spec: Any) -> tuple[str, ...]:
    """The names of all mesh axes in a `PartitionSpec`."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None)
    return tuple(name for entry in entries for name in entry)


def mesh_of(shardings: Sequence[Any]) -> Any | None:
    """The mesh of those that are on one: that of the most devices."""
    meshes = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


def split_over(shardings: Sequence[Any], likely: Sequence[bool]) -> int:
    """Over how many devices what is computed is taken to be split.

    As the inputs in `likely` are, the batch, and along other axes of their mesh that parameters are split along: so are most
    arrays that tensor parallelism makes. Or else as any input is.
    """
    divided = list(map(parts, shardings))
    if max(pick(divided, likely), default=1) == 1:
        return max(drop(divided, likely), default=1)
    named = [one for one in shardings if isinstance(one, NamedSharding)]
    mesh = max(pick(shardings, likely), key=parts).mesh
    return parts_by(mesh, tuple({name for one in named for name in names_in(one.spec)}))


def with_devices(mesh: Any) -> jax.sharding.Mesh | None:
    """The mesh over devices of this platform, if there are as many; which of them makes no difference to bytes."""
    devices = jax.devices()
    if mesh.size > len(devices):
        return None
    placed = np.array(devices[: mesh.size]).reshape(mesh.axis_sizes)
    return jax.sharding.Mesh(placed, mesh.axis_names, axis_types=mesh.axis_types)


def devices_of(shardings: Sequence[Any]) -> Collection[Any]:
    """The devices that the first of the inputs is on where that is known, or the default one."""
    is_known = lambda one: one is not None and not isinstance(getattr(one, "mesh", None), AbstractMesh)
    return next((one.device_set for one in shardings if is_known(one)), jax.devices()[:1])


def device_of(shardings: Sequence[Any]) -> Any:
    """A device that the inputs are on, or the default one."""
    return next(iter(devices_of(shardings)))


def platform_of(shardings: Sequence[Any]) -> str:
    """The platform to compile for."""
    device = device_of(shardings)
    if device.platform == "gpu":
        return "rocm" if "amd" in device.device_kind.lower() else "cuda"
    return device.platform
