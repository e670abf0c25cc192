"""Does state in codes cost a Transformer its loss? `python -m benchmarks.optimizer_quality gpt`, or `vit`: paired seeds.

The models of `experiments/gpt.py` and `experiments/vit.py` on their data, about 10M parameters, computed in bfloat16. Each seed
has its initial weights and its batches, and trains by AdamW with float32 weights and state; with moments in 8 and in 4 bits; with
bfloat16 weights that are rounded at random and moments in 8 bits; and with bfloat16 weights whose float32 masters are split. Rows
have the test loss of each training, and means of the differences from float32 with the same seed, with their standard errors.

Every device trains other seeds. Rows are saved after each seed, and no seed begins that would end after `--seconds`. It tries on
a CPU with `--seeds 2 --steps 60 --dim 64 --layers 2 --heads 2 --batch 8 --dtype float32`.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import memjax
from benchmarks import record
from experiments.data import stream, text
from experiments.harness.loop.classification import classification_loss
from experiments.models.blocks import GPT, BlocksConfig, ViT
from memjax import compress

KINDS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda tx: tx,
    "8 bits": lambda tx: memjax.compressed(tx),
    "4 bits": lambda tx: memjax.compressed(tx, bits=4),
    "rounded, 8 bits": lambda tx: compress.stochastic_round(memjax.compressed(tx)),
    "split": compress.split_master,
}
_BFLOAT16 = ("rounded, 8 bits", "split")  # kinds with such weights
_LENGTH, _TEST_BATCHES = 256, 64  # of the GPT
_IMAGE, _PATCH, _SMOOTHING = 64, 8, 0.1  # of the ViT


@dataclasses.dataclass(frozen=True)
class Config:
    model: Annotated[Literal["gpt", "vit"], tyro.conf.Positional]
    seeds: int = 16
    steps: int | None = None
    """Default: 1,000 of the GPT, 320 of the ViT, which are ten epochs."""
    batch: int | None = None
    """Default: 32 windows of 256 bytes, or 64 images."""
    dim: int = 384
    layers: int = 6
    heads: int = 6
    dtype: str = "bfloat16"
    learning_rate: float | None = None
    """Default: 1e-3 of the GPT, 5e-4 of the ViT."""
    seconds: float = 540.0
    """No seed begins that would end later."""
    kinds: tuple[str, ...] = tuple(KINDS)
    name: str = "optimizer_quality"
    """Results are saved as NAME_MODEL."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its data: batches are dicts of arrays."""

    make: Callable[[int], nnx.Module]
    loss: Callable[[nnx.Module, Any], jax.Array]
    train: Callable[[int], Iterator[Any]]
    tests: list[Any]
    batch: int
    steps: int
    learning_rate: float


def _gpt(config: Config) -> Case:
    data, batch = text.standard_library(), config.batch or 32
    size = {"length": _LENGTH, "batch_size": batch}

    def loss(model: nnx.Module, batch: Any) -> jax.Array:
        tokens = batch["text"].astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    return Case(
        lambda seed: GPT(_sizes(config), vocabulary=text.BYTES, length=_LENGTH, rngs=nnx.Rngs(seed)),
        loss,
        lambda seed: text.train_windows(data, seed=seed, **size),
        list(itertools.islice(text.test_windows(data, **size), _TEST_BATCHES)),
        batch,
        config.steps or 1000,
        config.learning_rate or 1e-3,
    )


def _vit(config: Config) -> Case:
    from experiments.data.photographs import photographs  # here: it needs scikit-image

    data, batch = photographs(_IMAGE), config.batch or 64
    sums = classification_loss(mean=data.mean, std=data.std, label_smoothing=_SMOOTHING)

    def loss(model: nnx.Module, batch: Any) -> jax.Array:
        found = sums(model, batch)
        return found["loss"] / found["count"]

    size = {"classes": len(data.classes), "image_size": _IMAGE, "patch": _PATCH}
    return Case(
        lambda seed: ViT(_sizes(config), **size, rngs=nnx.Rngs(seed)),
        loss,
        lambda seed: stream.train_batches(data, batch_size=batch, seed=seed, workers=0),
        list(stream.test_batches(data, batch_size=batch, workers=0)),
        batch,
        config.steps or 320,
        config.learning_rate or 5e-4,
    )


def _sizes(config: Config) -> BlocksConfig:
    return BlocksConfig(config.dim, config.layers, config.heads, config.dtype)


def _stack(batches: Any) -> Any:
    # By NumPy: XLA takes minutes to compile a stack of a thousand arrays for a GPU.
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


class _Programs:
    """What a seed runs, compiled side by side for one device."""

    def __init__(self, case: Case, kinds: tuple[str, ...]):
        schedule = optax.warmup_cosine_decay_schedule(0, case.learning_rate, case.steps // 10, case.steps)
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
        structure = nnx.graphdef(nnx.eval_shape(lambda: case.make(0)))
        loss = lambda weights, batch: case.loss(nnx.merge(structure, weights), batch)
        shape = functools.partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype))
        tests, batch = jax.tree.map(jnp.asarray, _stack(case.tests)), next(case.train(0))
        batches = jax.tree.map(lambda a: jax.ShapeDtypeStruct((case.steps, *a.shape), a.dtype), batch)
        weights = shape(nnx.state(nnx.eval_shape(lambda: case.make(0)), nnx.Param))
        lowered: dict[Any, Any] = {}
        for kind in kinds:
            start, train = _training(KINDS[kind](tx), kind, loss)
            carry = jax.eval_shape(start, weights)
            lowered["start", kind] = start.lower(weights)
            lowered["train", kind] = train.lower(carry, batches)
            test = jax.jit(lambda weights: jnp.mean(jax.lax.map(lambda batch: loss(weights, batch), tests)))
            lowered["test", kind] = test.lower(carry[0])
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda program: program.compile(), lowered.values())
        self._case, self._kinds, self._compiled = case, kinds, dict(zip(lowered, compiled, strict=True))

    def rows(self, seed: int, batches: Any) -> list[dict]:
        """A row for each kind of training from this seed, on its batches."""
        first = nnx.state(self._case.make(seed), nnx.Param)
        batches = jax.tree.map(jnp.asarray, batches)
        rows = []
        for kind in self._kinds:
            started = time.monotonic()
            run = lambda part, *args, kind=kind: self._compiled[part, kind](*args)
            # Copies: what is donated may be the weights themselves.
            (weights, _), losses = run("train", jax.tree.map(jnp.copy, run("start", first)), batches)
            row = {"seed": seed, "kind": kind, "test_loss": float(run("test", weights))}
            row["train_loss"] = float(jnp.mean(losses[-min(64, self._case.steps // 4) :]))
            rows.append(row)
            print(json.dumps(row | {"seconds": round(time.monotonic() - started, 1)}), flush=True)
        return rows


def _training(tx: Any, kind: str, loss: Callable[..., Any]) -> tuple[Any, Any]:
    """(weights) -> (weights, state), and (those, batches) -> (those, losses)."""

    @jax.jit
    def start(weights: Any) -> Any:
        if kind not in _BFLOAT16:
            return weights, tx.init(weights)
        narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        state = tx.init(narrow)
        return compress.set_master(weights, state) if kind == "split" else (narrow, state)

    def step(carry: Any, batch: Any) -> Any:
        weights, state = carry
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        updates, state = tx.update(gradients, state, weights)
        return (optax.apply_updates(weights, updates), state), value

    return start, jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches), donate_argnums=0)


def _case(config: Config) -> Case:
    return {"gpt": _gpt, "vit": _vit}[config.model](config)


def _batches(config: Config, seed: int) -> Any:
    """All batches of a seed, stacked: cut record by record, which takes longer than to train on them."""
    case = _case(config)
    return _stack(itertools.islice(case.train(seed), case.steps))


def _on_cpus() -> None:
    jax.config.update("jax_platforms", "cpu")  # a process that loads data is to leave the GPUs alone


def main(config: Config) -> None:
    with concurrent.futures.ProcessPoolExecutor(
        min(os.cpu_count() or 1, 8), multiprocessing.get_context("spawn"), _on_cpus
    ) as pool:
        try:
            _main(config, [pool.submit(_batches, config, seed) for seed in range(config.seeds)])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # of seeds that did not begin


def _main(config: Config, batches: list[concurrent.futures.Future]) -> None:
    began = time.monotonic()
    case = _case(config)
    weights = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: case.make(0)), nnx.Param))
    about = {
        "model": config.model,
        "device": jax.devices()[0].device_kind,
        "parameters": sum(w.size for w in weights),
        "steps": case.steps,
    }
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in range(config.seeds):
        seeds.put(seed)
    rows: list[dict] = []
    lock = threading.Lock()

    def train(device: Any) -> None:
        with jax.default_device(device):
            programs, longest = _Programs(case, config.kinds), 0.0
            print(f"{device}: compiled after {time.monotonic() - began:.0f} s", flush=True)
            while time.monotonic() - began + longest <= config.seconds:
                try:
                    seed = seeds.get_nowait()
                except queue.Empty:
                    return
                started = time.monotonic()
                found = programs.rows(seed, batches[seed].result())
                longest = max(longest, time.monotonic() - started)
                with lock:
                    rows.extend(found)
                    rows.sort(key=lambda row: row["seed"])
                    record.save(f"{config.name}_{config.model}", [about | row for row in [*_summary(rows), *rows]])

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(train, jax.devices()))
    for row in _summary(rows):
        print(json.dumps(row))


def _summary(rows: list[dict]) -> list[dict]:
    """For each kind means over the seeds, and of the differences from float32, with their standard errors."""
    by: dict[str, dict[int, dict]] = {}
    for row in rows:
        by.setdefault(row["kind"], {})[row["seed"]] = row
    found = []
    for kind, of_seed in by.items():
        summary: dict[str, Any] = {"kind": kind, "seeds": len(of_seed)}
        for name in ("test_loss", "train_loss"):
            values = [row[name] for row in of_seed.values()]
            differences = (
                [row[name] - by["float32"][seed][name] for seed, row in of_seed.items()] if "float32" in by else []
            )
            summary[f"mean_{name}"] = statistics.mean(values)
            if differences and kind != "float32":
                summary[f"{name}_difference"] = statistics.mean(differences)
                if len(differences) > 1:
                    summary[f"{name}_difference_error"] = statistics.stdev(differences) / len(differences) ** 0.5
        found.append(summary)
    return found


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main(tyro.cli(Config, description=__doc__))
