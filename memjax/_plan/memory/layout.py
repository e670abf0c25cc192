"""Where the inputs of a program lie, so that bytes are those of one device: as known, or as assumed.

Arrays, `jax.ShapeDtypeStruct`s and explicit axes tell their shardings. Under automatic axes `jax.jit` tells the mesh at most
while it traces, so an even split is assumed there, and said.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memjax._core.arrays import is_on_host
from memjax._core.compat import is_batched, is_tracer, scan_counts
from memjax._core.meshes import own_sharding, parts, split_over, with_devices
from memjax._core.program.dataflow import variables
from memjax._core.program.jaxpr import calls_in_place, nbytes

_GRADIENTS = "gradients are sharded as what they are gradients of"


class Layout(NamedTuple):
    """Where inputs lie.

    Attributes:
      shardings: of each; None: where `jax.jit` moves it.
      devices: over how many devices what is computed is taken to be split, in predictions.
      assumes: under which assumption bytes are those of a device; "" if it is none.
      is_guessed: whether shardings are assumed.
      shapes: of a device's parts of what is computed, by variable, where the compiler tells them; what is not in it is as types
        tell, or split evenly. None: all is split evenly.
    """

    shardings: Sequence[Any]
    devices: int = 1
    assumes: str = ""
    is_guessed: bool = False
    shapes: Mapping[Any, tuple[int, ...]] | None = None

    @property
    def of_results(self) -> list[Any]:
        """The shardings of gradients with respect to the inputs; None: as the compiler decides."""
        automatic = lambda one: isinstance(one, NamedSharding) and set(one.mesh.axis_types) == {AxisType.Auto}
        return [NamedSharding(one.mesh, one.spec) if automatic(one) else None for one in self.shardings]

    def within(self, manual: Collection[str]) -> Layout:
        """That inside a `jax.shard_map` over these axes, where types are those of a device's part."""
        split = next((one for one in self.shardings if parts(one) == self.devices), None)
        return self._replace(devices=parts(split, manual), shapes=None) if manual else self

    @property
    def has_parts(self) -> bool:
        """Whether the shapes of a device's parts are known."""
        return self.devices > 1 and self.shapes is not None

    @property
    def of_device(self) -> Layout:
        """That of a device's parts, of which bytes need not be divided any more."""
        return self._replace(devices=1, shapes=None)

    def local(self, nbytes: int) -> int:
        """A device's share of bytes that are computed."""
        return -(-nbytes // self.devices)


def layout_of(closed: Any, values: Sequence[Any], wrt: Sequence[bool]) -> Layout:
    """The layout of arrays, tracers or `jax.ShapeDtypeStruct`s.

    Args:
      closed: a program.
      values: its constants and inputs.
      wrt: which of them are differentiated.
    """
    types = [value if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value) for value in values]
    meshes = [aval.sharding.mesh for aval in types if getattr(aval.sharding, "mesh", None)]
    kinds = {kind for mesh in meshes for kind in mesh.axis_types}
    if AxisType.Manual in kinds:
        return Layout([None] * len(values))
    unknown = [is_tracer(value) for value in values]
    found = [None if hidden else own_sharding(value) for value, hidden in zip(values, unknown, strict=True)]
    if AxisType.Explicit in kinds:
        return _layout(_as_typed(types, found), wrt)
    if not any(unknown):
        return _layout(found, wrt)
    abstract = next(
        (mesh for mesh in [*meshes, jax.sharding.get_abstract_mesh()] if mesh.size > 1 and mesh.axis_names), None
    )
    mesh = None if abstract is None or set(abstract.axis_types) != {AxisType.Auto} else with_devices(abstract)
    if mesh is None:
        return Layout(found, assumes="all arguments are on one device" if jax.device_count() > 1 else "")
    is_scanned = scanned(closed)
    for i, value in enumerate(values):
        if unknown[i]:
            spec = PartitionSpec() if is_batched(value) else _split(value.shape, mesh, is_scanned[i])
            found[i] = NamedSharding(mesh, spec)
    evenly = f"arguments are split evenly over the {mesh.size} devices of the mesh, along their first axis that can be"
    return _layout(found, wrt)._replace(assumes=f"{evenly}, and {_GRADIENTS}", is_guessed=True)


def warn_of_guess(layout: Layout, name: str, fix: str) -> None:
    """Says that shardings were assumed, if so, where `name` made a plan."""
    if layout.is_guessed:
        warnings.warn(
            f"{name}: jax.jit does not tell the shardings of arguments while it traces. The budget holds if {layout.assumes}. "
            f"To have the bytes of your shardings, {fix}",
            UserWarning,
            stacklevel=2,
        )


def _layout(shardings: Sequence[Any], wrt: Sequence[bool]) -> Layout:
    devices = split_over(shardings, [not one for one in wrt])
    several = any(one is not None and len(one.device_set) > 1 for one in shardings)
    return Layout(shardings, devices, _GRADIENTS if several else "")


def _as_typed(types: Sequence[Any], found: Sequence[Any]) -> list[Any]:
    """The shardings that types of explicit axes tell where none is found; what has none is on all devices."""
    told = []
    for aval, own in zip(types, found, strict=True):
        own_mesh = None if own is not None or aval.sharding.mesh.empty else with_devices(aval.sharding.mesh)
        told.append(own if own_mesh is None else NamedSharding(own_mesh, aval.sharding.spec))
    mesh = next((one.mesh for one in told if isinstance(one, NamedSharding)), None)
    return [NamedSharding(mesh, PartitionSpec()) if one is None and mesh is not None else one for one in told]


def _split(shape: Sequence[int], mesh: jax.sharding.Mesh, is_scanned: bool) -> PartitionSpec:
    """Over as many devices as divide an axis evenly, the first that they divide; that along which a loop slices comes last."""
    dims = [*range(len(shape))]
    dims = dims[1:] + dims[:1] if is_scanned else dims
    names = [of for n in range(1, len(mesh.axis_names) + 1) for of in itertools.combinations(mesh.axis_names, n)]
    count = lambda of: math.prod(mesh.shape[name] for name in of)
    for chosen in sorted(names, key=count, reverse=True):
        for dim in dims:
            if shape[dim] and shape[dim] % count(chosen) == 0:
                return PartitionSpec(*[None] * dim, chosen)
    return PartitionSpec()


def local_bytes(aval: Any, sharding: Any) -> int:
    """Bytes of a device's part of an array; none of one on the host, nor on a CPU, whose memory that is: see `fixed_bytes`."""
    if is_on_host(aval):
        return 0
    return nbytes(aval if sharding is None else aval.update(shape=sharding.shard_shape(aval.shape), sharding=None))


def scanned(closed: Any) -> list[bool]:
    """Which constants and inputs of a program one of its loops slices."""
    sliced: set[Any] = set()
    for eqn in calls_in_place(closed, differentiable=True, checkpoints=True).eqns:
        if eqn.primitive.name == "scan":
            sliced.update(variables(eqn.invars[sum(scan_counts(eqn)) :]))
    return [var in sliced for var in (*closed.jaxpr.constvars, *closed.jaxpr.invars)]
