"""Where a training's arrays lie, whether a step fits there, and what several hosts agree on."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.harness.errors import ExperimentError


@dataclass(frozen=True)
class Layout:
    """Where a training's arrays lie.

    Attributes:
      mesh: devices of all hosts; batches are split over its axis "data".
      batch: sharding of every array of a batch.
      state: shardings of a state, from its shapes; None: every device holds all of it.
    """

    mesh: Mesh
    batch: NamedSharding
    state: Callable[[Any], Any] | None = None


def data_parallel(mesh: Mesh) -> Layout:
    """The batch is split over all devices, all else is replicated."""
    return Layout(mesh, batch_sharding(mesh))


def data_mesh(devices=None) -> Mesh:
    """A mesh of `devices`, by default all of all hosts, along the axis "data"."""
    return Mesh(np.array(jax.devices() if devices is None else devices), ("data",))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data"))


def check_batch(batch_size: int, accumulate: int, mesh: Mesh) -> None:
    """Raises ExperimentError unless every device gets the same share of every micro-batch."""
    parts = mesh.shape["data"]
    if batch_size % (accumulate * parts):
        over = f"{parts} devices" if parts == mesh.size else f"{parts} groups of devices"
        raise ExperimentError(
            f"--batch-size {batch_size} does not divide over {over} and --accumulate "
            f"{accumulate}: it must be a multiple of {accumulate * parts}"
        )


def on_any_host(happened: bool) -> bool:
    """Whether it happened to a process of any host. All must call this at the same place."""
    return happened if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.array(happened))))


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """A context in which an ExperimentError of one process ends all of them. All must enter it at the same place.

    Without it the others would wait for the one that has gone, in the next collective operation.
    """
    refusal: ExperimentError | None = None
    try:
        yield
    except ExperimentError as error:
        refusal = error
    if on_any_host(refusal is not None):
        raise refusal or ExperimentError("another process of this run has stopped: its output says why")


def put(
    batch: dict[str, np.ndarray], sharding: NamedSharding, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The global batch, of these shapes, from this host's part of it or from all of it."""
    return {
        key: jax.make_array_from_process_local_data(sharding, value, shapes[key].shape) for key, value in batch.items()
    }


def step_bytes(program: Any) -> int:
    """Bytes that a compiled training step takes on each device: arguments, which its results replace, and temporaries."""
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def fits(program: Any, limit: float = math.inf) -> bool:
    """Whether a compiled step takes no more bytes than `limit` and each device of every host. All hosts must call this."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", math.inf) for device in jax.local_devices()]
    return not on_any_host(step_bytes(program) > min(limit, *limits))
