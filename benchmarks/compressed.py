"""Steps with compressed activations on one GPU, beside uncompressed ones: `python -m benchmarks.compressed`, about six minutes.

For each network, batches of 256 natural images of 224x224 in bfloat16, SGD with momentum, every case in a process of its own:

- settle: some adaptive steps at a capacity that cannot overflow, for the bounds; with these, steps from the beginning again,
  as the other cases take them, for the capacities;
- plain: nothing compressed;
- conv: what convolutions read, error-bounded; and all: the rest, too, in four bits a value.

Milliseconds are of the compiled step, one after the other, and of `memjax.compress.transactional`, which looks whether
steps overflowed while the next ones run. `--batch 8 --size 64 --models resnet18 --steps 2` tries it anywhere.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import pathlib
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes, one of them at work

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks import record

_WARM = 40  # steps, one and a half seconds: the clocks of an idle GPU are low


@dataclasses.dataclass(frozen=True)
class Config:
    models: tuple[str, ...] = ("resnet50", "vgg16")
    cases: tuple[str, ...] = ("plain", "conv", "all")
    batch: int = 256
    size: int = 224
    """Side of the images in pixels."""
    settle: int = 33
    """Steps before bounds are taken."""
    steps: int = 40
    """That are timed."""
    time_limit: float = 540.0
    """Start nothing after this many seconds."""
    name: str = "compressed"


def main(config: Config) -> None:
    begin, rows = time.monotonic(), []
    lock = str(pathlib.Path(tempfile.mkdtemp()) / "lock")

    def run(case: str, model: str, **more: Any) -> dict:
        if time.monotonic() - begin > config.time_limit:
            return {"model": model, "case": case, "error": "no time left"}
        given = {**dataclasses.asdict(config), "case": case, "model": model, "lock": lock, **more}
        found = record.in_fresh_process("benchmarks.compressed", given)
        row = {key: value for key, value in found.items() if key not in given or key in ("case", "model", "batch")}
        rows.append(row)
        print(json.dumps(row)[:1500], flush=True)
        record.save(config.name, rows)
        return row

    def both(model: str) -> None:
        with ThreadPoolExecutor() as pool:
            settled = pool.submit(run, "settle", model)
            if "plain" in config.cases:
                pool.submit(run, "plain", model)
            found = settled.result()
            if "error" in found:
                return
            given = {"bounds": found["bounds"], "bits": found["capacities"]}
            for case in config.cases:
                if case != "plain":
                    pool.submit(run, case, model, **given)

    with ThreadPoolExecutor() as pool:
        list(pool.map(both, config.models))


def measure(given: dict) -> dict:
    from experiments.compressed_training import PRESETS, _model
    from experiments.harness.classification import classification_loss
    from experiments.harness.optimizer import optimizer
    from experiments.harness.step import init_state, train_step
    from memjax import compress

    case, is_compressed = given["case"], given["case"] != "plain"
    own: dict[str, Any] = {"model": given["model"], "batch_size": given["batch"], "image_size": given["size"]}
    config = dataclasses.replace(PRESETS["gpu"], **own, where="all" if case == "all" else "conv", learning_rate=0.02)
    tx = optimizer(config, 1000)
    if is_compressed:
        tx = compress.adaptive(tx, interval=1000)
    make = functools.partial(_model, config, 16, is_compressed)
    loss = classification_loss(mean=(0.5,) * 3, std=(0.25,) * 3, label_smoothing=0.0)
    seconds: dict[str, float] = {}
    with _timed(seconds, "trace"):
        step = train_step(make, loss, tx, 1)
        state = jax.eval_shape(functools.partial(init_state, make, tx))
        if is_compressed:
            step = compress.transactional(step, window=10**9, ahead=True)
            if case != "settle":
                step.capacities = [tuple(given["bits"])]
                state = _with_settings(state, given["bits"])
            program = step.lower(state, _batch(given))
        else:
            program = jax.jit(step, donate_argnums=0).lower(state, _batch(given))
    with _lock(given["lock"], fcntl.LOCK_SH), _timed(seconds, "compile"):
        compiled = program.compile()
    with _lock(given["lock"], fcntl.LOCK_EX):
        return _time(given, compiled, step if is_compressed else None, make, tx) | {"seconds": seconds}


def _time(given: dict, compiled: Any, run: Any, make: Any, tx: Any) -> dict:
    from experiments.compression.observed import layers_of
    from experiments.harness.step import init_state

    settling = given["case"] == "settle"
    temp = compiled.memory_analysis().temp_size_in_bytes
    state = jax.jit(functools.partial(init_state, make, tx))()
    if run is not None and not settling:
        state = _with_settings(state, given["bits"], given["bounds"])
    images = _images(given)
    found: dict[str, Any] = {"temp_bytes": temp}
    if not settling:
        once = compiled if run is None else lambda state, batch: compiled(state, jnp.zeros((), bool), batch)
        state, milliseconds = _milliseconds(once, state, images, given["steps"])
        found["milliseconds"] = milliseconds
    if run is not None:
        state, each = _milliseconds(run, state, images, given["settle"] if settling else given["steps"])
        state = run.finish(state)
        if settling:
            bounds = [float(b) for b in layers_of(state).bound]
            state = _with_settings(jax.jit(functools.partial(init_state, make, tx))(), [None] * len(bounds), bounds)
            run._needs = []
            state = run.finish(_milliseconds(run, state, images, 2 * given["steps"] + _WARM)[0])
        layers, last = layers_of(state), jax.device_get(state.optimizer.last[0])
        bits = np.asarray(last.bits)
        values = np.array([np.prod(shape) for shape, _ in layers.shapes], float)
        found |= {
            "milliseconds_transactional": each,
            "replays": run.replays,
            "bits": [round(float(b), 3) for b in bits],
            "bits_per_value": float((bits * values).sum() / values.sum()),
            "values": values.sum(),
            "bounds": [float(b) for b in layers.bound],
        }
        if settling:
            run._lower_capacities([layers])
            found["capacities"] = list(run.capacities[0])
    statistics = jax.local_devices()[0].memory_stats()
    found["peak_bytes"] = statistics["peak_bytes_in_use"] if statistics else None
    return found


def _milliseconds(step: Any, state: Any, images: list[Any], count: int) -> tuple[Any, float]:
    """Of a step, after some that are not counted."""
    for i in range(_WARM):
        state, sums = _first_two(step(state, images[i % len(images)]))
    jax.block_until_ready(sums)
    begin = time.perf_counter()
    for i in range(count):
        state, sums = _first_two(step(state, images[i % len(images)]))
    jax.block_until_ready(sums)
    return state, 1e3 * (time.perf_counter() - begin) / count


def _first_two(results: tuple) -> tuple:
    return results[0], results[1]  # a transaction's program also reports


def _with_settings(state: Any, bits: list[float | None], bounds: list[float] | None = None) -> Any:
    from memjax import compress

    def changed(node: Any) -> Any:
        if not isinstance(node, compress.Layers):
            return node
        bound = node.bound if bounds is None else jnp.asarray(bounds, jnp.float32)
        return dataclasses.replace(node, bits_per_value=tuple(bits), bound=bound)

    is_layers = lambda node: isinstance(node, compress.Layers)
    return dataclasses.replace(state, params=jax.tree.map(changed, state.params, is_leaf=is_layers))


def _batch(given: dict) -> dict[str, jax.ShapeDtypeStruct]:
    batch, size = given["batch"], given["size"]
    return {
        "image": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.uint8),
        "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }


def _images(given: dict) -> list[dict[str, jax.Array]]:
    """Batches of crops of photographs, enlarged."""
    from experiments.data.photographs import photographs
    from experiments.data.stream import train_batches

    source = min(96, given["size"])
    batches = train_batches(photographs(source), seed=0, batch_size=given["batch"], workers=0)
    size = (given["batch"], given["size"], given["size"], 3)

    def enlarged(batch: dict) -> dict[str, jax.Array]:
        images = jax.image.resize(jnp.asarray(batch["image"], jnp.float32), size, "bicubic")
        return {"image": jnp.clip(images, 0, 255).astype(jnp.uint8), "label": jnp.asarray(batch["label"])}

    return [enlarged(batch) for batch, _ in zip(batches, range(4), strict=False)]


@contextlib.contextmanager
def _timed(seconds: dict, name: str):
    begin = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - begin, 1)


@contextlib.contextmanager
def _lock(path: str, kind: int):
    """Many compile at a time, which tries kernels on the GPU, or one is timed. What is traced meanwhile disturbs nobody."""
    with open(path, "w") as file:
        fcntl.flock(file, kind)
        yield


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Config, description=__doc__))
