"""What is free on a device beside the arguments and results of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memjax._core.check import readable_bytes
from memjax._core.program.costs import array_bytes
from memjax._core.program.jaxpr import nbytes, variables
from memjax._plan.compiled import device_of
from memjax._plan.derivative import Derivative


def free_bytes(types: Sequence[Any], derivative: Derivative, shardings: Sequence[Any]) -> int:
    """The device's memory less what is in use, or what the inputs take, and less value and gradients.

    Raises ValueError for a device that keeps no statistics, as CPUs do not.
    """
    device = device_of(shardings)
    stats = (device.memory_stats() if hasattr(device, "memory_stats") else None) or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            f'budget must be a number of bytes, got "device" on {device.device_kind}, which tells no limit of its memory: '
            'give bytes, or a text like "40GiB"'
        )
    inputs = sum(
        nbytes(aval) // (1 if sharding is None else aval.size // max(_local(sharding, aval), 1) or 1)
        for aval, sharding in zip(types, shardings, strict=True)
    )
    results = sum(map(array_bytes, variables([*derivative.outputs, *derivative.backward.outvars])))
    free = stats["bytes_limit"] - max(stats.get("bytes_in_use", 0), inputs) - results
    if free <= 0:
        raise ValueError(
            f'budget is "device", but arguments ({readable_bytes(inputs)}) and results ({readable_bytes(results)}) leave nothing '
            f"of {readable_bytes(stats['bytes_limit'])}: donate arguments, or shard them"
        )
    return free


def _local(sharding: Any, aval: Any) -> int:
    """Elements of a device's part."""
    count = 1
    for size in sharding.shard_shape(aval.shape):
        count *= size
    return count
