"""The order that XLA runs a program in: for speed by default, or for the least memory.

By default XLA orders a program so that GPUs send while they compute, and that CPUs run operations beside each other. Then more
is alive at once. What the other order costs in time is not known. So it is the last resort, where no plan fits otherwise.
docs/benchmarks/jit.md has the bytes that it saves in steps of Llama-3-8B's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORTH_IT = 1.1  # times the budget: a plan that takes more is not expected to fit in another order
_DISABLED = "xla_disable_hlo_passes"


def ordered_for_memory(platform: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Options of the compiler for that, beside those given; none where XLA has no choice.

    `xla_gpu_enable_latency_hiding_scheduler` changes nothing in the XLA of JAX 0.10 and 0.11: the pass itself is left out.
    """
    if platform == "cpu":
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    if platform in ("gpu", "cuda", "rocm"):
        return {_DISABLED: ",".join([*filter(None, [given.get(_DISABLED)]), "latency-hiding-scheduler"])}
    return {}
