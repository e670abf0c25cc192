"""The update alone of 10^9 parameters: `python -m benchmarks.optimizer_state`, about four minutes on an H100 (80 GB).

AdamW of optax with everything in float32; with moments in 8 and in 4 bits; with bfloat16 weights whose masters are split, and
with bfloat16 weights rounded at random. Gradients have the dtype of the weights. Weights and state are donated. Bytes are for
each parameter: `compiled_bytes` are arguments, results that are not in their place, and temporary ones. `floor_ms` is the time to
read and write weights and state once, and to read gradients, at `--bandwidth`. Each kind runs in a fresh process. PyTorch's fused
AdamW and torchao's in few bits run beside them where they are installed and there is a GPU.

`--parameters 2e6 --calls 2` tries it anywhere.
"""

import dataclasses
import importlib.util
import json
import os
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import memjax
from benchmarks import record
from memjax import compress

KINDS = ("float32", "8 bits", "4 bits", "split", "split, 8 bits", "rounded, 8 bits", "rounded, 4 bits")
PEERS = ("torch, float32", "torchao, 8 bits", "torchao, rounded, 8 bits", "torchao, rounded, 4 bits")
_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Config:
    parameters: float = 1e9
    kinds: tuple[str, ...] = KINDS
    calls: int = 10
    """Updates that are timed together, one after another, as in training: the host is ahead of the device. Five times."""
    bandwidth: float = 3.35e12
    """Bytes a second of the device's memory: an H100's."""
    peers: tuple[str, ...] = PEERS
    """Optimizers of other libraries, which are timed after these."""
    name: str = "optimizer_state"


def main(config: Config) -> None:
    rows = []
    for kind in config.kinds:
        case = {"kind": kind, "parameters": config.parameters, "calls": config.calls, "bandwidth": config.bandwidth}
        rows.append(record.in_fresh_process("benchmarks.optimizer_state", case))
        print(json.dumps(rows[-1]), flush=True)
        record.save(config.name, rows)
    for kind in config.peers if importlib.util.find_spec("torchao") and jax.default_backend() == "gpu" else ():
        case = {"kind": kind, "calls": config.calls, "bandwidth": config.bandwidth}
        found = record.in_fresh_process(
            "benchmarks.cases.optimizer_torch", case | {"shapes": shapes_of(config.parameters), "rounds": _ROUNDS}
        )
        rows.append({name: value for name, value in found.items() if name not in ("shapes", "rounds")})
        print(json.dumps(rows[-1]), flush=True)
        record.save(config.name, rows)
    if failed := [row["error"] for row in rows if "error" in row]:
        raise SystemExit(f"failed: {failed}")


def optimizer(kind: str) -> tuple[Any, Any]:
    """An optimizer of one of `KINDS`, and the dtype of its weights."""
    weights, _, bits = kind.partition(", ")
    tx: Any = optax.adamw(1e-4)
    width = (bits or weights).split()[0]
    if width in ("8", "4"):
        tx = memjax.compressed(tx, bits=int(width))
    wrap = {"split": compress.split_master, "rounded": compress.stochastic_round}.get(weights)
    return (tx, jnp.float32) if wrap is None else (wrap(tx), jnp.bfloat16)


def shapes_of(parameters: float) -> list[tuple[int, int]]:
    """Matrices of a Transformer of width D: 12 D^2 for each layer."""
    width = 4096 if parameters >= 1e9 else 256
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    return max(1, round(parameters / sum(a * b for a, b in shapes))) * shapes


def measure(case: dict) -> dict:
    tx, dtype = optimizer(case["kind"])
    weights = [jnp.zeros(shape, dtype) for shape in shapes_of(case["parameters"])]
    count = sum(w.size for w in weights)

    def update(weights: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    state = jax.jit(tx.init)(weights)
    gradients = [jax.random.normal(jax.random.key(i), w.shape, dtype) for i, w in enumerate(weights)]
    began = time.perf_counter()
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(weights, state, gradients).compile()
    compile_s = time.perf_counter() - began
    memory: Any = compiled.memory_analysis()
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    moved = 2 * size(weights) + 2 * size(state) + size(gradients)
    times = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(case["calls"]):
            weights, state = compiled(weights, state, gradients)
        jax.block_until_ready((weights, state))
        times.append((time.perf_counter() - began) / case["calls"])
    seconds = statistics.median(times[1:])
    return {
        "device": jax.devices()[0].device_kind,
        "parameters": count,
        "ms": round(1e3 * seconds, 3),
        "floor_ms": round(1e3 * moved / case["bandwidth"], 3),
        "ratio_to_floor": round(seconds * case["bandwidth"] / moved, 3),
        "state_bytes": round(size(state) / count, 4),
        "weights_and_state_bytes": round((size(weights) + size(state)) / count, 4),
        "temporary_bytes": round(memory.temp_size_in_bytes / count, 4),
        "compiled_bytes": round(
            (
                memory.argument_size_in_bytes
                + memory.output_size_in_bytes
                - memory.alias_size_in_bytes
                + memory.temp_size_in_bytes
            )
            / count,
            4,
        ),
        "compile_s": round(compile_s, 2),
    }


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Config, description=__doc__))
