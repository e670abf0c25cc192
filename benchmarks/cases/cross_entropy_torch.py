"""Linear + cross-entropy in PyTorch, plain and compiled, and in its libraries that are installed, in one process.

`python -m benchmarks.cross_entropy` runs it. Memory is the peak above the inputs, gradients included.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def implementations() -> dict[str, Callable[..., Any]]:
    def plain(x: Any, w: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy((x @ w.T).float(), labels)

    functions: dict[str, Callable[..., Any]] = {"PyTorch": plain, "PyTorch, torch.compile": torch.compile(plain)}
    try:
        from cut_cross_entropy import linear_cross_entropy

        functions["Cut Cross-Entropy"] = linear_cross_entropy
        functions["Cut Cross-Entropy, unfiltered"] = lambda x, w, y: linear_cross_entropy(x, w, y, filter_eps=None)
    except ImportError as error:
        print(error)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        functions["Liger"] = lambda x, w, y: LigerFusedLinearCrossEntropyFunction.apply(x, w, y)[0]
    except ImportError as error:
        print(error)
    return functions


def timed(name: str, function: Callable[..., Any], seconds: float, x: Any, w: Any, labels: Any) -> dict:
    def call() -> float:
        x.grad = w.grad = None
        torch.cuda.synchronize()
        began = time.perf_counter()
        function(x, w, labels).backward()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    try:
        began = time.perf_counter()
        call()
        compile_s = time.perf_counter() - began
        x.grad = w.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peak = torch.cuda.max_memory_allocated() - before
        end = time.perf_counter() + seconds / 2
        while time.perf_counter() < end:
            call()
        times: list[float] = []
        while sum(times) < seconds or len(times) < 3:
            times.append(call())
        ms = round(statistics.median(times) * 1e3, 2)
        return {"name": name, "ms": ms, "peak_bytes": peak, "calls": len(times), "compile_s": round(compile_s, 1)}
    except Exception as error:  # one that fails must not hide the others
        return {"name": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}


def main(case: dict) -> None:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(case["tokens"], case["dim"], **options).requires_grad_()
    w = (torch.randn(case["vocabulary"], case["dim"], **options) * case["dim"] ** -0.5).requires_grad_()
    labels = torch.randint(0, case["vocabulary"], (case["tokens"],), device="cuda")
    rows = [timed(name, f, case["seconds"], x, w, labels) for name, f in implementations().items()]
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, type=json.loads)
    main(parser.parse_args().case)
