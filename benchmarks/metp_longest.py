"""The longest sequence that each parallelism can train on: `python -m benchmarks.metp_longest`, three minutes on four GPUs.

It runs real steps, optimizer and loss included, of a model of seven billion parameters cut to a few layers, with the same memory
per GPU for all. Then it measures tokens per second at the longest length that all but tensor parallelism take; METP runs once as
in the search, and once as with `experiments/metp.py --spend auto`, which spends the memory that METP leaves. The search starts
at `--guesses`, so that it tries few lengths, and the parallelisms run side by side. With `--once` it takes one step at each of
these lengths, one after another, and searches for nothing: for so much memory that the longest sequences take minutes.

`--size 8 --dim 32 --heads 8 --layers 1 --memory-gib 0.005 --guesses 8192 --grid 1024 --parallelisms metp` tries it on simulated
CPU devices.
"""

import dataclasses
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import tyro

import memjax
from benchmarks import record
from experiments import metp
from experiments.data.text import standard_library
from experiments.parallelism.comparison import try_steps
from experiments.parallelism.trial import Trial

memjax.shard.hide_hops()
_KEPT = ("size", "dim", "heads", "layers", "memory_gib")


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 4
    """GPUs of the ring."""
    dim: int = 4096
    heads: int = 32
    layers: int = 2
    memory_gib: float = 8.0
    """Memory of each GPU."""
    parallelisms: tuple[str, ...] = ("metp", "tp", "tp_sp", "ulysses", "ring")
    guesses: tuple[int, ...] = (122880, 49152, 49152, 58368, 53248)
    """Lengths at which the search starts, one for each parallelism."""
    grid: int = 1024
    """Lengths tried are multiples of it."""
    once: bool = False
    """One step at each of the guesses: its bytes as compiled, those that were used, its time."""
    name: str = "metp_longest"
    """Name of the file of results."""


def main(config: Config) -> None:
    base = dataclasses.asdict(config)
    environ = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={config.size}"}
    if record._accelerator() is not None:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
        total = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
        devices = ",".join(map(str, range(config.size)))
        environ = {
            "CUDA_VISIBLE_DEVICES": devices,
            "XLA_PYTHON_CLIENT_MEM_FRACTION": str(config.memory_gib * 1024 / total),
        }

    def run(name: str, length: int, **options: object) -> dict:
        case = {**base, "parallelism": name, "length": length, **options}
        return record.in_fresh_process("benchmarks.metp_longest", case, environ=environ, timeout=400)

    rows: list[dict] = []

    def keep(result: dict) -> None:
        rows.append({k: v for k, v in result.items() if k not in (*base, "turn", "length") or k in _KEPT})
        print(json.dumps(rows[-1]), flush=True)
        record.save(config.name, rows)

    if config.once:
        for name, length in zip(config.parallelisms, config.guesses, strict=True):
            result = run(name, length)
            keep(result | ({"fails": length} if "RESOURCE_EXHAUSTED" in result.get("error", "") else {}))
        return
    with ThreadPoolExecutor() as pool:
        for result in pool.map(run, config.parallelisms, config.guesses):
            keep(result)
    others = {row["parallelism"]: row["longest"] for row in rows if row["parallelism"] != "tp" and row.get("longest")}
    with ThreadPoolExecutor() as pool, tempfile.NamedTemporaryFile() as turn:
        cases = [(name, "time") for name in others] + [(name, "auto") for name in others if name == "metp"]
        for result in pool.map(lambda case: run(case[0], min(others.values()), turn=turn.name, spend=case[1]), cases):
            keep(result)


def case(case: dict) -> dict:
    """The longest length, or the speed at a length. It runs in a fresh process."""
    config = metp.MetpConfig(
        preset="gpu",
        name="longest",
        optimizer="adamw",
        schedule="cosine",
        weight_decay=0.0,
        batch_size=1,
        dim=case["dim"],
        layers=case["layers"],
        heads=case["heads"],
        dtype="bfloat16",
        spend=case.get("spend", "time"),
    )
    text, name, grid = standard_library().train, case["parallelism"], case["grid"]
    limit = case["memory_gib"] * 2**30 if jax.default_backend() == "cpu" else None
    stats = jax.local_devices()[0].memory_stats() or {}
    result = {"bytes_limit": stats.get("bytes_limit", limit)}
    trial = lambda length, steps: try_steps(config, name, length, text, steps=steps, limit=limit)
    if "turn" in case:
        with open(case["turn"]) as file:
            # While one measures no other compiles: XLA tries kernels out on the same GPUs.
            fcntl.flock(file, fcntl.LOCK_SH)
            longest = Trial.fitting(config, name, case["length"], limit or np.inf)
            fcntl.flock(file, fcntl.LOCK_UN)
            fcntl.flock(file, fcntl.LOCK_EX)
            return result | {"spent": longest.config.spend} | _speed(longest, text)
    length = case["length"]
    if case.get("once"):
        return result | _once(Trial(config, name, length), text)
    fitting, failing = 0, np.inf
    while 0 < length < failing and length != fitting:
        if trial(length, 2) is None:
            failing = length
        else:
            fitting = length
        step = -(-length // (32 * grid)) * grid
        length = length + step if failing == np.inf else fitting or failing - step
    return result | {"longest": fitting, "fails": failing}


def _once(trial: Trial, text: np.ndarray) -> dict:
    """One step, the first: `bytes` as compiled, `peak_bytes` of the allocator, of the GPU that holds most."""
    state, batch = trial.start(), trial.batch(text, 0)
    begin = time.perf_counter()
    jax.block_until_ready(trial.step(state, batch))
    seconds = time.perf_counter() - begin
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    return {"ran": trial.length, "bytes": trial.bytes, "peak_bytes": max(peaks), "seconds": seconds}


def _speed(trial: Trial, text: np.ndarray) -> dict:
    """Tokens a second of the fastest of some steps."""
    state = trial.start()
    seconds = []
    for step in range(5):
        batch = trial.batch(text, step)
        begin = time.perf_counter()
        state = trial.step(state, batch)
        seconds.append(time.perf_counter() - begin)
    return {"speed_at": trial.length, "tokens_per_second": trial.length / min(seconds)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Config, description=__doc__))
