"""Data parallelism: the batch is split over all devices along one mesh axis, all else is replicated."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.harness.config import ExperimentError


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


def put(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This host's examples as its part of the global batch."""
    sharding = batch_sharding(mesh)
    return {key: jax.make_array_from_process_local_data(sharding, value) for key, value in batch.items()}
