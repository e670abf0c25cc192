"""Does compression cost accuracy? `python -m benchmarks.compressed_seeds`, four minutes on a GPU: trainings with many seeds.

Single trainings end up to two points apart, so it takes many to see small differences. Each seed has initial parameters, and
batches of crops of photographs in an order of its own. With these it trains, by the recipe of `benchmarks.compressed_training`:

- plain: nothing is compressed;
- raw: the compressed program, with bounds so small that everything is stored raw: only the program differs;
- compressed: the inputs of convolutions are encoded, with bounds set as in the experiment.

All seeds share programs, compiled once, with capacities that cannot overflow. The table has test accuracies and losses with
standard errors, and differences from plain training with the same seed. `--model resnet18 --width 0.25 --size 64 --batch 16
--steps 4 --seconds 60` tries it anywhere.
"""

import dataclasses
import functools
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.compressed_training import RECIPES

_Kind = Literal["plain", "raw", "compressed"]
_MEASURED = ("top1", "test_loss", "train_loss")
_CROP = 64  # pixels, enlarged to `size`


@dataclasses.dataclass(frozen=True)
class Config:
    model: Literal["alexnet", "vgg16", "resnet18", "resnet50"] = "resnet18"
    kinds: tuple[_Kind, ...] = ("plain", "raw", "compressed")
    size: int = 112
    """Side of the images in pixels."""
    width: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    batch: int = 256
    steps: int = 640
    """Steps of each training."""
    gpus: int = 1
    """Number of GPUs, each of which trains other seeds."""
    seconds: float = 200.0
    """No seed begins that would end later."""
    name: str = "compressed_seeds"


def main(config: Config) -> None:
    def rows_of(gpu: int) -> list[dict]:
        environ = {"CUDA_VISIBLE_DEVICES": str(gpu)} if config.gpus > 1 else {}
        settings = dataclasses.asdict(config) | {"first": gpu}
        result = record.in_fresh_process("benchmarks.compressed_seeds", settings, environ, timeout=config.seconds + 600)
        return result.get("rows", [result])

    with ThreadPoolExecutor(config.gpus) as pool:
        rows = [row for of_gpu in pool.map(rows_of, range(config.gpus)) for row in of_gpu]
    record.save(
        config.name, [{"model": config.model, "size": config.size, "dtype": config.dtype} | row for row in rows]
    )
    failed = [row["error"] for row in rows if "error" in row]
    if failed:
        raise SystemExit(f"failed: {failed}")
    Console(width=130).print(_table(config, rows))


def _table(config: Config, rows: list[dict]) -> Table:
    """Means over seeds, and means of the differences from the first kind."""
    columns = ["", "seeds", *(title for name in _MEASURED for title in (name.replace("_", " "), "difference"))]
    table = Table(*columns, title=f"{config.model}: means and their standard errors")
    by = {kind: {row["seed"]: row for row in rows if row["kind"] == kind} for kind in config.kinds}
    seeds = sorted(set.intersection(*map(set, by.values())))
    first = by[config.kinds[0]]
    for kind, rows_by_seed in by.items():
        cells = []
        for name in _MEASURED:
            values = [rows_by_seed[seed][name] for seed in seeds]
            differences = [value - first[seed][name] for value, seed in zip(values, seeds, strict=True)]
            cells.append(record.mean_and_error(values, 4))
            cells.append("" if rows_by_seed is first else record.mean_and_error(differences, 4))
        table.add_row(kind, str(len(seeds)), *cells)
    return table


def measure(settings: dict) -> list[dict]:
    """Rows of all seeds that there is time for."""
    from experiments.compressed_training import PRESETS, _model
    from experiments.compression.controlled import controlled
    from experiments.data.photographs import photographs
    from experiments.data.stream import test_batches, train_batches
    from experiments.harness.loop.classification import classification_loss
    from experiments.harness.loop.optimizer import optimizer
    from experiments.harness.loop.step import eval_step, init_state, train_step
    from memjax import compress

    begin = time.monotonic()
    data = photographs(_CROP)
    loss = classification_loss(mean=data.mean, std=data.std, label_smoothing=0.0, size=settings["size"])
    changes = {"model": settings["model"], "batch_size": settings["batch"], "image_size": settings["size"]}
    changes |= {key: settings[key] for key in ("width", "dtype")} | RECIPES[settings["model"]]
    base: Any = dataclasses.replace(PRESETS["gpu"], **changes)
    raw = dataclasses.replace(base, sigma=1e-30, bound=1e-30)
    batch = {
        "image": jax.ShapeDtypeStruct((settings["batch"], _CROP, _CROP, 3), jnp.uint8),
        "label": jax.ShapeDtypeStruct((settings["batch"],), jnp.int32),
    }

    def compiled(kind: str) -> tuple[Any, ...]:
        config = raw if kind == "raw" else base
        tx = (optimizer if kind == "plain" else controlled)(config, settings["steps"])
        make = lambda seed: _model(dataclasses.replace(config, seed=seed), 16, kind != "plain")
        init = jax.jit(lambda seed: init_state(lambda: make(jax.random.key(seed)), tx)).lower(jnp.int32(0))
        state = init.out_info
        step = train_step(lambda: make(0), loss, tx, 1, scale=compress.scale_gradient)
        lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
        test = jax.jit(eval_step(lambda: make(0), loss)).lower(state, batch)
        return init.compile(), lowered.compile(), test.compile()

    with ThreadPoolExecutor() as pool:
        programs = dict(zip(settings["kinds"], pool.map(compiled, settings["kinds"]), strict=True))
    on_device = functools.partial(jax.tree.map, jnp.asarray)
    stream = {"batch_size": settings["batch"], "workers": 0}
    batches = train_batches(data, seed=settings["first"], **stream)
    train = [on_device(next(batches)) for _ in range(settings["steps"])]
    tests = [on_device(one) for one in test_batches(data, **stream)]
    rows: list[dict] = []
    seed, longest = settings["first"], 0.0
    while not rows or time.monotonic() - begin + longest < settings["seconds"]:
        started = time.monotonic()
        order = np.random.default_rng(seed).permutation(settings["steps"])
        for kind, (init, step, test) in programs.items():
            state, sums = init(jnp.int32(seed)), []
            for i in order:
                state, step_sums = step(state, train[i])
                sums.append(step_sums)
            ended, tested = (_means(part) for part in (sums[-64:], [test(state, one) for one in tests]))
            row = {"top1": tested["top1"], "test_loss": tested["loss"], "train_loss": ended["loss"]}
            rows.append({"seed": seed, "kind": kind} | row)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        seed += settings["gpus"]
        longest = max(longest, time.monotonic() - started)
    return rows


def _means(sums: list[dict]) -> dict[str, float]:
    total = {name: float(sum(float(one[name]) for one in sums)) for name in sums[0]}
    return {name: value / total["count"] for name, value in total.items()}


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps({"rows": measure(json.loads(sys.argv[2]))}))
    else:
        main(tyro.cli(Config, description=__doc__))
