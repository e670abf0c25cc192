"""The update alone by PyTorch's fused AdamW and by torchao's in few bits. `python -m benchmarks.optimizer_state` runs it.

torchao compiles one kernel for the update of each shape of weights.
"""

import json
import statistics
import sys
import time
from typing import Any

import torch


def optimizer(kind: str, weights: list[Any]) -> Any:
    if kind == "torch, float32":
        return torch.optim.AdamW(weights, lr=1e-4, fused=True)
    from torchao.optim import AdamW4bit, AdamW8bit

    one = AdamW4bit if kind.endswith("4 bits") else AdamW8bit
    return one(weights, lr=1e-4, bf16_stochastic_round="rounded" in kind)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    dtype = torch.bfloat16 if "rounded" in case["kind"] else torch.float32
    weights = [torch.zeros(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in case["shapes"]]
    for w in weights:
        w.grad = torch.randn_like(w)
    count = sum(w.numel() for w in weights)
    before = torch.cuda.memory_allocated()
    one = optimizer(case["kind"], weights)
    began = time.perf_counter()
    one.step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - began
    state = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(case["rounds"] + 1):
        began = time.perf_counter()
        for _ in range(case["calls"]):
            one.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / case["calls"])
    seconds = statistics.median(times[1:])
    size = sum(w.numel() * w.element_size() for w in weights)
    moved = 3 * size + 2 * state
    return {
        "device": torch.cuda.get_device_name(),
        "parameters": count,
        "ms": round(1e3 * seconds, 3),
        "floor_ms": round(1e3 * moved / case["bandwidth"], 3),
        "ratio_to_floor": round(seconds * case["bandwidth"] / moved, 3),
        "state_bytes": round(state / count, 4),
        "weights_and_state_bytes": round((size + state) / count, 4),
        "temporary_bytes": round((torch.cuda.max_memory_allocated() - before - state) / count, 4),
        "compile_s": round(compile_s, 2),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[2]))))
