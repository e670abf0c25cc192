"""Embedding, head and cross-entropy with a table whose entries are split over GPUs, in PyTorch: a process for each GPU.

`python -m benchmarks.mesh --tools vocabulary` runs it. A GPU makes the logits of its own entries, and all add up sums of
exponentials and the labels' logits. The loss is plain PyTorch, or Liger's kernel for vocabularies in parallel, where it is
installed. Liger's fused kernel for several GPUs sums by multicast over NVLink, and comes in a package of its own; it is not here.
Memory is the peak above inputs and gradients.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


class _Copied(torch.autograd.Function):
    """What all have alike: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


def _plain(logits: Any, labels: Any) -> Any:
    """The loss of each token in float32; `logits` are those of this GPU's entries."""
    entries = logits.shape[-1]
    logits = logits.float()
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest[:, None]
    here = labels - dist.get_rank() * entries
    mine = (here >= 0) & (here < entries)
    at_label = logits.gather(1, torch.where(mine, here, 0)[:, None])[:, 0]
    return _Summed.apply(logits.exp().sum(-1)).log() - _Summed.apply(torch.where(mine, at_label, 0))


def losses() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"PyTorch": _plain}
    try:
        from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction as Liger

        apply = lambda logits, labels: Liger.apply(
            logits[:, None], labels[:, None], dist.group.WORLD, -100, 0.0, "pytorch", "global"
        )
        found["PyTorch, Liger's kernel"] = lambda logits, labels: apply(logits, labels)[:, 0]
    except ImportError as error:
        print(error)
    return found


def _step(per_token: Callable[..., Any], x: Any, table: Any, tokens: Any) -> Any:
    here = tokens - dist.get_rank() * table.shape[0]
    mine = (here >= 0) & (here < table.shape[0])
    own = torch.where(mine[:, None], torch.nn.functional.embedding(torch.where(mine, here, 0), table), 0)
    x = x + _Summed.apply(own)
    loss = per_token(_Copied.apply(x) @ table.T, torch.roll(tokens, -1)).mean()
    loss.backward()
    return loss


def _worker(rank: int, case: dict, results: str) -> None:
    size, cuda = case["devices"], torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{results}.start", rank=rank, world_size=size
    )
    device = {"device": "cuda" if cuda else "cpu"}
    torch.manual_seed(0)  # the same x and tokens everywhere
    scale = case["dim"] ** -0.5
    x = (torch.randn(case["tokens"], case["dim"], dtype=torch.bfloat16, **device) * scale).requires_grad_()
    tokens = torch.randint(0, case["vocabulary"], (case["tokens"],), **device)
    table = torch.randn(case["vocabulary"], case["dim"], dtype=torch.bfloat16, **device).chunk(size)[rank].clone()
    table = (table * scale).requires_grad_()
    rows = [_timed(name, f, case["seconds"], x, table, tokens) for name, f in losses().items()]
    if rank == 0:
        with open(results, "w") as file:
            json.dump(rows, file)
    dist.destroy_process_group()


def _timed(name: str, per_token: Callable[..., Any], seconds: float, x: Any, table: Any, tokens: Any) -> dict:
    cuda = x.is_cuda

    def call() -> float:
        x.grad = table.grad = None
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        _step(per_token, x, table, tokens)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    loss = float(_step(per_token, x, table, tokens).detach())
    temp = None
    if cuda:
        x.grad = table.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        gradients = x.nbytes + table.nbytes
        temp = torch.cuda.max_memory_allocated() - before - gradients
    warm = [call() for _ in range(3)]
    count = torch.tensor(max(int(seconds / warm[-1]), 3), device=x.device)
    dist.broadcast(count, 0)  # as many calls everywhere
    times = [call() for _ in range(int(count))]
    return {
        "tool": "vocabulary",
        "how": name,
        "devices": dist.get_world_size(),
        "temp_bytes": temp,
        "ms": statistics.median(times) * 1e3,
        "calls": len(times),
        "loss": loss,
    }


def main(case: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "rows")
        processes.spawn(_worker, (case, results), nprocs=case["devices"])
        with open(results) as file:
            print(json.dumps({"rows": json.load(file)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, type=json.loads)
    main(parser.parse_args().case)
