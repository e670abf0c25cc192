"""DenseNets measured: `python -m benchmarks.densenet step | batch | depth`; every case runs in a process of its own.

step: DenseNet-264 (k=48), 224x224, bfloat16, on a GPU, beside torchvision's two variants where torch is installed.
batch: the largest batch of the same network in a given amount of GPU memory.
depth: the paper's figures 4 and 5: DenseNet-BC (k=12), 32x32, memory (compiled) and, if asked, time against depth.
"""

import concurrent.futures
import dataclasses
import importlib.util
import itertools
import tempfile
from collections.abc import Iterator
from typing import Literal

import tyro

from benchmarks import record

MODULE = "benchmarks.cases.densenet"
Keep = Literal["all", "convolutions", "later_convolutions", "features"]


@dataclasses.dataclass(frozen=True)
class Step:
    """Time and memory of a training step at one batch size."""

    keeps: tuple[Keep, ...] = ("convolutions", "later_convolutions", "features")
    batches: tuple[int, ...] = (64,)
    implementations: tuple[Literal["triton", "xla"], ...] = ("triton", "xla")
    optimizers: tuple[bool, ...] = (False, True)
    """Without and with an update by SGD, of the first implementation."""
    torch: bool = True
    name: str = "densenet264_step"

    def cases(self) -> list[dict]:
        cases: list[dict] = [
            {"library": "jax", "keep": k, "batch": b, "implementation": i, "optimizer": o}
            for b in self.batches
            for k in self.keeps
            for i in (self.implementations if k != "all" else self.implementations[:1])
            for o in (self.optimizers if i == self.implementations[0] else (False,))
        ]
        if self.torch and importlib.util.find_spec("torchvision") is not None:
            cases += [
                {"library": "torch", "memory_efficient": e, "batch": b} for b in self.batches for e in (False, True)
            ]
        return cases

    def rows(self) -> Iterator[dict]:
        yield from map(_run, self.cases())


@dataclasses.dataclass(frozen=True)
class Batch:
    """The largest batch, in steps of 8, whose training step (no optimizer) runs in `gib` of GPU memory."""

    gib: float = 12.0
    keeps: tuple[Keep, ...] = ("features", "convolutions", "all")
    torch: tuple[Literal["naive", "memory_efficient"], ...] = ("naive", "memory_efficient")
    bracket: tuple[int, int] = (8, 1200)
    """A batch that fits, and one that does not."""
    parallel: int = 4
    """Processes that share the GPU while searching, each with `gib` of memory."""
    total_gib: float = 139.8
    name: str = "densenet264_batch"

    def rows(self) -> Iterator[dict]:
        searched: list[dict] = [{"library": "jax", "keep": k} for k in self.keeps]
        if importlib.util.find_spec("torchvision") is not None:
            searched += [{"library": "torch", "memory_efficient": mode == "memory_efficient"} for mode in self.torch]
        with tempfile.TemporaryDirectory() as cache:
            for case in searched:
                yield self._search(case, cache)

    def _search(self, case: dict, cache: str) -> dict:
        """Close in on the limit with several processes at once, then time the largest that fits, alone."""
        if case["library"] == "jax":
            fraction = f"{self.gib / self.total_gib:.4f}"
            # The timed run need not compile again what the search compiled.
            environ = {"XLA_PYTHON_CLIENT_MEM_FRACTION": fraction, "JAX_COMPILATION_CACHE_DIR": cache}
            limit = {}
        else:
            environ, limit = None, {"limit_gib": self.gib}

        def run(batch: int, repeats: int) -> dict:
            return _run({**case, **limit, "batch": batch, "repeats": repeats}, environ)

        fits, fails = (b // 8 for b in self.bracket)
        while fails - fits > 1:
            between = range(fits + 1, fails)
            tried = sorted({between[len(between) * (i + 1) // (self.parallel + 1)] for i in range(self.parallel)})
            with concurrent.futures.ThreadPoolExecutor(self.parallel) as pool:
                rows = list(pool.map(lambda b: run(8 * b, 1), tried))
            for batch, row in zip(tried, rows, strict=True):
                if "error" not in row:
                    fits = max(fits, batch)
                elif any(word in row["error"] for word in ("RESOURCE_EXHAUSTED", "out of memory")):
                    fails = min(fails, batch)
                else:
                    raise RuntimeError(f"{row}")
        while "error" in (row := run(8 * fits, 5)):  # torch's memory fragments more with every step
            fails, fits = fits, fits - 1
        return {**row, "fails": 8 * fails}


@dataclasses.dataclass(frozen=True)
class Depth:
    """Memory against depth; `time` also runs the steps."""

    depths: tuple[int, ...] = (40, 100, 160, 250, 400, 502)
    keeps: tuple[Keep, ...] = ("all", "convolutions", "features")
    batch: int = 64
    time: bool = False
    largest_all: int = 160  # plain autodiff of a deeper network takes minutes to compile
    name: str = "densenet_bc_depth"

    def rows(self) -> Iterator[dict]:
        for depth, keep in itertools.product(self.depths, self.keeps):
            if keep == "all" and depth > self.largest_all:
                continue
            network = {"library": "jax", "network": "cifar", "growth_rate": 12, "size": 32, "dtype": "float32"}
            yield _run({**network, "depth": depth, "keep": keep, "batch": self.batch, "repeats": 3 if self.time else 0})


def _run(case: dict, environ: dict[str, str] | None = None) -> dict:
    row = record.in_fresh_process(MODULE, case, environ)
    print(row, flush=True)
    return row


if __name__ == "__main__":
    what = tyro.cli(Step | Batch | Depth, description=__doc__)
    rows = []
    for row in what.rows():
        rows.append(row)
        path = record.save(what.name, rows)  # after every row: a run may be stopped
    print(path)
