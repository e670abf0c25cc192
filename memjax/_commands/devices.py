"""GPUs that are not there: `--devices 8xH100`. XLA compiles for them by the descriptions in `gpus/`, and nothing runs."""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from memjax._commands.factory import CommandError
from memjax._core.arguments import Parts
from memjax._core.check import readable_bytes
from memjax._core.meshes import is_in_host_memory, own_sharding

_FOLDER = importlib.resources.files("memjax._commands") / "gpus"
_SHARES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_USUAL_SHARE = 0.75  # of a GPU's memory that JAX takes


class Gpus(NamedTuple):
    """Several of a GPU.

    Attributes:
      asked: as in the command.
      devices: of JAX.
      total: bytes of the memory of each.
      share: how much of it JAX takes.
    """

    asked: str
    devices: Sequence[Any]
    total: int
    share: float

    @property
    def nbytes(self) -> int:
        """Bytes of each that programs can take."""
        return int(self.total * self.share)

    def __str__(self) -> str:
        return (
            f"Compiled for {len(self.devices)} x {self.devices[0].device_kind}. JAX takes {self.share:.0%} of the memory, "
            f"{readable_bytes(self.nbytes)} of {readable_bytes(self.total)}, unless {_SHARES[0]} says otherwise; "
            "kernels of cuDNN take their workspace on top of the bytes below"
        )


def known() -> dict[str, str]:
    """The descriptions of GPUs, by name, as XLA reads them."""
    files = sorted(file.name for file in _FOLDER.iterdir() if file.name.endswith(".txtpb"))
    return {file.removesuffix(".txtpb").upper(): (_FOLDER / file).read_text() for file in files}


def described(asked: str) -> Gpus:
    """The GPUs that a flag asks for. Call it before anything asks JAX for its devices: those of this machine are left alone."""
    gpus = known()
    found = re.fullmatch(r"([1-9]\d*)x(.+)", asked)
    if found is None or found[2].upper() not in gpus:
        raise CommandError(
            f"--devices must be a number and a GPU, such as 8xH100, got {asked!r}: known are {', '.join(gpus)}"
        )
    text = gpus[found[2].upper()]
    share = _share()
    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # JAX knows no topology before
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="described", topology=f"1x1x{found[1]}", target_config=text
        )
    except NotImplementedError:
        fix = "pip install 'memjax[gpu]', which needs no GPU"
        raise CommandError(f"--devices {asked} needs the CUDA plugin of JAX, which is not installed: {fix}") from None
    return Gpus(asked, topology.devices, int(re.findall(r"device_memory_size: (\d+)", text)[0]), share)


def _share() -> float:
    name, text = next(((name, os.environ[name]) for name in _SHARES if os.environ.get(name)), ("", ""))
    try:
        share = float(text) if text else _USUAL_SHARE
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise CommandError(
            f"{name} must be above 0 and at most 1, got {text!r}: JAX takes this share of a GPU's memory"
        )
    return share


def placed(args: Sequence[Any], gpus: Gpus) -> Sequence[Any]:
    """The types of the arguments, on these GPUs: those without shardings on the only one, or wherever the step needs them."""
    parts = Parts(tuple(args), {})
    wanted = set(gpus.devices)
    shardings = [own_sharding(array) for array in parts.arrays]
    if any(map(is_in_host_memory, shardings)):
        what = "JAX tells no memory of the host beside GPUs that are not there, and an argument is on it"
        raise CommandError(f"--devices {gpus.asked} needs arguments on the GPUs: {what}")
    is_there = [sharding is not None and _devices(sharding) <= wanted for sharding in shardings]
    if len(wanted) == 1:
        shardings = [SingleDeviceSharding(gpus.devices[0])] * len(shardings)
    elif not any(is_there):
        raise CommandError(_needs_shardings(gpus, "the arguments have none"))
    elif elsewhere := [
        array for array, ok in zip(parts.arrays, is_there, strict=True) if own_sharding(array) and not ok
    ]:
        one = f"{elsewhere[0].dtype}{list(elsewhere[0].shape)}"
        raise CommandError(_needs_shardings(gpus, f"an argument {one} is on {own_sharding(elsewhere[0])}"))
    types = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding, weak_type=getattr(array, "weak_type", False))
        for array, sharding in zip(parts.arrays, shardings, strict=True)
    ]
    return parts.rebuild(types)[0]


def _devices(sharding: Any) -> set[Any]:
    """None for a mesh without devices."""
    is_abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    return {None} if is_abstract else sharding.device_set


def _needs_shardings(gpus: Gpus, what: str) -> str:
    return (
        f"--devices {gpus.asked} needs arguments with shardings over these GPUs, and {what}: let the factory take them, "
        "def FACTORY(devices), and return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec)) "
        "with mesh = jax.make_mesh(sizes, names, devices=devices)"
    )
