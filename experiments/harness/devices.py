"""Data parallelism: the batch is split over all devices along one mesh axis, all else is replicated."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.harness.errors import ExperimentError


def data_mesh(devices=None) -> Mesh:
    """All devices of all hosts, or those given, along the axis "data"."""
    return Mesh(np.array(jax.devices() if devices is None else devices), ("data",))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data"))


def check_batch(batch_size: int, accumulate: int, mesh: Mesh) -> None:
    """Raises ExperimentError unless every device gets the same share of every micro-batch."""
    if batch_size % (accumulate * mesh.size):
        raise ExperimentError(
            f"--batch-size {batch_size} does not divide over {mesh.size} devices and --accumulate "
            f"{accumulate}: it must be a multiple of {accumulate * mesh.size}"
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


def put(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This host's examples as its part of the global batch."""
    sharding = batch_sharding(mesh)
    return {key: jax.make_array_from_process_local_data(sharding, value) for key, value in batch.items()}
