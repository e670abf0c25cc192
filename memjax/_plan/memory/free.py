"""What is free on a device beside the arguments and results of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memjax._core.check import readable_bytes
from memjax._core.lists import pick
from memjax._core.meshes import device_of
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import variables
from memjax._plan.derivative import Passes
from memjax._plan.memory.layout import Layout, local_bytes


def free_bytes(types: Sequence[Any], derivative: Passes, layout: Layout) -> int:
    """The device's memory less what is in use, or what the inputs take, and less value and gradients.

    Raises ValueError for a device that keeps no statistics, as CPUs do not.
    """
    device = device_of(layout.shardings)
    stats = (device.memory_stats() if hasattr(device, "memory_stats") else None) or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            f'budget must be a number of bytes, got "device" on {device.device_kind}, which tells no limit of its memory: '
            'give bytes, or a text like "40GiB"'
        )
    held = list(map(local_bytes, types, layout.shardings))
    inputs, gradients = sum(held), sum(pick(held, derivative.wrt))
    results = gradients + sum(map(array_bytes, variables(derivative.outputs)))
    free = stats["bytes_limit"] - max(stats.get("bytes_in_use", 0), inputs) - results
    if free <= 0:
        raise ValueError(
            f'budget is "device", but arguments ({readable_bytes(inputs)}) and results ({readable_bytes(results)}) leave nothing '
            f"of {readable_bytes(stats['bytes_limit'])}: donate arguments, or shard them"
        )
    return free
