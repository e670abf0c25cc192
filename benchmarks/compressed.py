"""Steps with compressed activations on one GPU, beside uncompressed ones: `python -m benchmarks.compressed`, about six minutes.

For each network, batches of 256 natural images of 224x224 in bfloat16, SGD with momentum, every case in a process of its own:

- settle: a training to the middle of 1,000 steps, with adaptive bounds and capacities that cannot overflow; then it is timed;
- plain: nothing is compressed; parameters are those that settle ended with;
- conv: inputs of convolutions are error-bounded; the state and its capacities are those that settle ended with;
- all: as conv, and the other saved arrays have four bits a value.

All cases have the same parameters, because a GPU at its power limit takes longer for some numbers than for others.

Milliseconds are those of compiled steps one after the other, and of `memjax.compress.transactional`, which checks whether a
step overflowed while the next one runs. `--batch 8 --size 64 --models resnet18 --settle 4 --steps 2` tries it anywhere.
"""

import contextlib
import dataclasses
import fcntl
import functools
import gc
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes, one of them at work

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tyro

from benchmarks import record
from benchmarks.compressed_training import RECIPES

_WARM = 40  # steps, one and a half seconds: the clocks of an idle GPU are low
_ALL_STEPS = 1000  # of the schedule


@dataclasses.dataclass(frozen=True)
class Config:
    models: tuple[str, ...] = ("resnet50", "vgg16")
    cases: tuple[str, ...] = ("plain", "conv", "all")
    batch: int = 256
    size: int = 224
    """Side of the images in pixels."""
    smallest: int = 4096
    """Arrays of fewer values are not encoded."""
    settle: int = 520
    """Steps before the timed ones. Bounds change after powers of two."""
    steps: int = 40
    """Timed steps."""
    time_limit: float = 540.0
    """Start nothing after this many seconds."""
    name: str = "compressed"


def main(config: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:  # has the lock, and the states that settle saves
        _run_all(config, folder)


def _run_all(config: Config, folder: str) -> None:
    begin, rows = time.monotonic(), []

    def run(case: str, model: str, **options: Any) -> dict:
        if time.monotonic() - begin > config.time_limit:
            return {"model": model, "case": case, "error": "no time left"}
        settings = {**dataclasses.asdict(config), "case": case, "model": model, "folder": folder, **options}
        result = record.in_fresh_process("benchmarks.compressed", settings)
        row = {
            key: value
            for key, value in result.items()
            if key not in settings or key in ("case", "model", "batch", "smallest")
        }
        rows.append(row)
        print(json.dumps(row)[:1500], flush=True)
        record.save(config.name, rows)
        return row

    def all_cases(model: str) -> None:
        settled = run("settle", model)
        if "error" in settled:
            return
        with ThreadPoolExecutor() as pool:
            for case in config.cases:
                pool.submit(run, case, model, bits=settled["capacities"])

    with ThreadPoolExecutor() as pool:
        list(pool.map(all_cases, config.models))


def measure(settings: dict) -> dict:
    from experiments.compressed_training import PRESETS, _model
    from experiments.compression.controlled import controlled
    from experiments.harness.loop.classification import classification_loss
    from experiments.harness.loop.optimizer import optimizer
    from experiments.harness.loop.step import init_state, train_step
    from memjax import compress

    case, is_compressed = settings["case"], settings["case"] != "plain"
    changes: dict[str, Any] = {
        "model": settings["model"],
        "batch_size": settings["batch"],
        "image_size": settings["size"],
    }
    changes |= {"smallest": settings["smallest"], "where": "all" if case == "all" else "conv"} | RECIPES[
        settings["model"]
    ]
    config = dataclasses.replace(PRESETS["gpu"], **changes)
    plain_tx = optimizer(config, _ALL_STEPS)
    adaptive = controlled(dataclasses.replace(config, interval=_ALL_STEPS), _ALL_STEPS)
    compressed_init = jax.jit(functools.partial(init_state, functools.partial(_model, config, 16, True), adaptive))
    tx = adaptive if is_compressed else plain_tx
    make = functools.partial(_model, config, 16, is_compressed)
    loss = classification_loss(mean=(0.5,) * 3, std=(0.25,) * 3, label_smoothing=0.0)
    lock, seconds = pathlib.Path(settings["folder"]) / "lock", dict[str, float]()
    init = jax.jit(functools.partial(init_state, make, tx))
    with _timed(seconds, "trace"):
        step = train_step(make, loss, tx, 1, scale=compress.scale_gradient)
        state = jax.eval_shape(init)
        if is_compressed:
            step = compress.transactional(step, window=10**9, ahead=True)
            if case != "settle":
                step.capacities = [tuple(settings["bits"])]
                state = _placed(state)
            program = step.lower(state, _batch(settings))
        else:
            program = jax.jit(step, donate_argnums=0).lower(_placed(state), _batch(settings))
    with _lock(lock, fcntl.LOCK_SH), _timed(seconds, "compile"):
        compiled = program.compile()
    with _lock(lock, fcntl.LOCK_EX):
        row = {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes, "seconds": seconds}
        if case == "plain":
            state = _uncompressed(_restored(settings, compressed_init), plain_tx)
            row["milliseconds"] = _milliseconds(compiled, state, settings)[1]
        elif case == "settle":
            row |= _settle(settings, step, init())
        else:
            row |= _time(settings, compiled, step, _restored(settings, compressed_init))
        statistics = jax.local_devices()[0].memory_stats()
        return row | {"peak_bytes": statistics["peak_bytes_in_use"] if statistics else None}


def _settle(settings: dict, run: Any, state: Any) -> dict:
    """Train, save the state, and find the capacities that it needs."""
    from experiments.compression.observed import layers_of

    losses = []
    for i, batch in enumerate(_images(settings, settings["settle"])):
        state, sums = run(state, batch)
        if i % 20 == 0:
            losses.append(sums["loss"] / sums["count"])
    state = run.finish(state)
    losses = [round(float(loss), 3) for loss in losses]
    if not np.isfinite(losses).all():
        raise FloatingPointError(f"the training that settles diverged: {losses}")
    run._needs = []
    state, milliseconds = _milliseconds(run, state, settings)
    state = run.finish(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(_saved(settings), state)
    run._lower_capacities([layers_of(state)])
    row = {"losses": losses, "milliseconds_transactional": milliseconds, "capacities": list(run.capacities[0])}
    return row | _codes(state)


def _time(settings: dict, compiled: Any, run: Any, state: Any) -> dict:
    from experiments.compression.observed import layers_of

    state, milliseconds = _milliseconds(lambda s, batch: compiled(s, jnp.zeros((), bool), batch), state, settings)
    state, transactional = _milliseconds(run, state, settings)
    state = run.finish(state)
    row = {"milliseconds": milliseconds, "milliseconds_transactional": transactional, "replays": run.replays}
    layers = dataclasses.replace(layers_of(state), bits_per_value=tuple(settings["bits"]))
    return row | _codes(state) | {"code_bytes": layers.nbytes()}


def _codes(state: Any) -> dict:
    """Bits per value that the codes of the last step needed, and the bounds."""
    from experiments.compression.observed import layers_of

    layers, bits = layers_of(state), np.asarray(jax.device_get(state.optimizer.last[0].bits))
    values = np.array([np.prod(shape) for shape, _ in layers.shapes], float)
    return {
        "bits": [round(float(b), 3) for b in bits],
        "bits_per_value": float((bits * values).sum() / values.sum()),
        "values": values.sum(),
        "bounds": [float(b) for b in layers.bound],
    }


def _saved(settings: dict) -> pathlib.Path:
    return pathlib.Path(settings["folder"]) / settings["model"]


def _placed(tree: Any) -> Any:
    """Types of arrays on this device, where those of a checkpoint are: the program depends on it."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def _restored(settings: dict, init: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(_saved(settings), _placed(jax.eval_shape(init)))


def _uncompressed(state: Any, tx: Any) -> Any:
    """The state of plain training with the parameters of a state of compressed training."""
    params, rest = state.params["net"], state.rest["net"]
    return dataclasses.replace(state, params=params, rest=rest, optimizer=jax.jit(tx.init)(params))


def _milliseconds(step: Any, state: Any, settings: dict) -> tuple[Any, float]:
    """Milliseconds per step, after some that are not counted, and the state that they end with."""
    images = list(_images(settings, 2))
    for i in range(_WARM):
        state, sums = _first_two(step(state, images[i % 2]))
    jax.block_until_ready(sums)
    gc.collect()
    gc.freeze()
    begin = time.perf_counter()
    for i in range(settings["steps"]):
        state, sums = _first_two(step(state, images[i % 2]))
    jax.block_until_ready(sums)
    return state, 1e3 * (time.perf_counter() - begin) / settings["steps"]


def _first_two(results: tuple) -> tuple:
    return results[0], results[1]  # a transaction's program also reports


def _batch(settings: dict) -> dict[str, jax.ShapeDtypeStruct]:
    batch, size = settings["batch"], settings["size"]
    return {
        "image": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.uint8),
        "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }


def _images(settings: dict, count: int) -> Iterator[dict[str, jax.Array]]:
    """Batches of crops of photographs, enlarged."""
    from experiments.data.photographs import photographs
    from experiments.data.stream import train_batches

    batches = train_batches(photographs(min(96, settings["size"])), seed=0, batch_size=settings["batch"], workers=0)
    for batch in itertools.islice(batches, count):
        yield {"image": _enlarged(batch["image"], settings["size"]), "label": jnp.asarray(batch["label"])}


@functools.partial(jax.jit, static_argnums=1)
def _enlarged(images: jax.Array, size: int) -> jax.Array:
    enlarged = jax.image.resize(images.astype(jnp.float32), (len(images), size, size, 3), "bicubic")
    return jnp.clip(enlarged, 0, 255).astype(jnp.uint8)


@contextlib.contextmanager
def _timed(seconds: dict, name: str):
    begin = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - begin, 1)


@contextlib.contextmanager
def _lock(path: pathlib.Path, kind: int):
    """Lets many processes compile, which tries kernels on the GPU, or one run timed steps. Tracing needs no lock."""
    with open(path, "w") as file:
        fcntl.flock(file, kind)
        yield


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Config, description=__doc__))
