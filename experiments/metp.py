"""A Transformer on long sequences, spread over a ring of devices by METP (Liang et al. 2025) or one of its peers.

    python experiments/metp.py

Trains a byte-level Transformer on the source of Python's standard library on eight devices, simulated if the machine has
no GPUs, then measures one step with each of five parallelisms against the length of the sequences: memory, tokens a
second. A few minutes on two CPU cores. `--find-max-length` finds, by bisection on real steps, the longest sequence that each
of them can train on. Several hosts: docs/guides/metp.md.
"""

import os

if (
    "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", "")
    and "JAX_NUM_PROCESSES" not in os.environ
):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

import memjax
from experiments.data.text import BYTES, standard_library
from experiments.harness import config as configs
from experiments.harness import files, plots, records
from experiments.harness.config import RunConfig, parse
from experiments.harness.console import exit_status, output
from experiments.harness.errors import ExperimentError
from experiments.harness.optimizer import optimizer
from experiments.models import parallel
from experiments.models.transformer import Transformer, TransformerConfig, sharded_loss, shardings

memjax.shard.hide_hops()

_MIB = 2**20
_SPENT: dict[str, dict[str, Any]] = {
    "memory": {"recompute": False, "head_chunks": 1},
    "time": {"recompute": True, "head_chunks": 8},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetpConfig(RunConfig):
    """The Transformer, how it is spread, and what is compared."""

    parallelism: Literal["metp", "tp", "tp_sp", "ulysses", "ring"] = "metp"
    """How training is spread: METP, tensor parallelism, the same with sequence parallelism, Ulysses, or ring attention, the last
    two with fully sharded weights."""
    ring: int = 0
    """Devices of a ring; the others share the batch. 0: all of them."""
    length: int = 1024
    """Bytes of a sequence."""
    steps: int = 30
    """Optimizer steps; 0: only compare."""
    dim: int = 64
    """Width of the Transformer."""
    layers: int = 2
    """Each of attention and feed-forward."""
    heads: int = 8
    """Heads of queries, keys and values."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation; parameters are float32."""
    spend: Literal["auto", "memory", "time"] = "time"
    """What METP spends. memory: its feed-forward layers multiply nothing again in the backward pass, its attention takes all
    heads at once. time: they multiply again, and heads go in eight groups. auto: memory while a device has enough of it."""
    compare: tuple[str, ...] = parallel.NAMES
    """What is measured beside one another; none: no comparison."""
    compare_lengths: tuple[int, ...] = (512, 1024, 2048)
    """Lengths of sequences of the comparison."""
    find_max_length: bool = False
    """Also find the longest sequence that each can train on: lengths double, then bisect, each by a real step."""
    memory_limit: int = 64
    """MiB that a device may take in that search where there is no GPU to run out of memory."""
    longest: int = 2**24
    """Where that search ends."""

    experiment: ClassVar[str] = "metp"

    def validate(self) -> None:
        super().validate()
        if self.resume:
            raise ExperimentError("--resume: these short runs keep no checkpoints; start another")
        if unknown := set(self.compare) - set(parallel.NAMES):
            raise ExperimentError(f"--compare takes {', '.join(parallel.NAMES)}, got {', '.join(sorted(unknown))}")
        for name in ("length", "dim", "layers", "heads", "memory_limit", "longest"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("ring", "steps"):
            if getattr(self, name) < 0:
                raise ExperimentError(f"--{name} must be at least 0, got {getattr(self, name)}")
        if self.dim % (2 * self.heads):
            raise ExperimentError(f"--dim must be a multiple of twice --heads, {2 * self.heads}, got {self.dim}")
        ring = self.ring or jax.device_count()
        if jax.device_count() % ring:
            raise ExperimentError(f"--ring {ring} does not divide the {jax.device_count()} devices")
        for name, lengths in (("length", [self.length]), ("compare-lengths", self.compare_lengths)):
            if any(n % (2 * ring) for n in lengths):
                raise ExperimentError(f"--{name} must be multiples of twice the ring, {2 * ring}, got {lengths}")
        if self.heads % ring:
            raise ExperimentError(
                f"--heads must be a multiple of the ring, {ring}, for those that share heads; got {self.heads}"
            )
        if self.batch_size % (jax.device_count() // ring):
            raise ExperimentError(
                f"--batch-size must be a multiple of the {jax.device_count() // ring} rings, got {self.batch_size}"
            )

    def transformer(self, parallelism: str) -> TransformerConfig:
        sizes = {
            "dim": self.dim,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.heads,
            "hidden": 4 * self.dim,
            **_SPENT[self.spend],
        }
        return TransformerConfig(
            vocabulary=BYTES,
            dtype=self.dtype,
            parallelism=parallelism,  # type: ignore[arg-type]
            **sizes,
        )

    def mesh(self) -> Mesh:
        ring = self.ring or jax.device_count()
        return jax.make_mesh((jax.device_count() // ring, ring), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)


_adamw = functools.partial(MetpConfig, optimizer="adamw", schedule="cosine", weight_decay=0.0)
PRESETS = {
    "cpu": _adamw(preset="cpu", batch_size=1, learning_rate=1e-3),
    "gpu": _adamw(
        preset="gpu", batch_size=1, learning_rate=3e-4, length=65536, steps=50, dim=4096, layers=2, heads=32,
        dtype="bfloat16", compare_lengths=(32768, 65536, 131072), spend="auto",
    ),
}  # fmt: skip


def variants(config: MetpConfig, parallelism: str) -> list[MetpConfig]:
    """What the setting auto stands for, the fastest first."""
    if config.spend != "auto":
        return [config]
    spent: tuple[Literal["memory", "time"], ...] = ("memory", "time") if parallelism == "metp" else ("time",)
    return [dataclasses.replace(config, spend=one) for one in spent]


class Training:
    """A model with its optimizer, sharded, and its compiled step. `config.spend` is "memory" or "time"."""

    def __init__(self, config: MetpConfig, parallelism: str, length: int):
        self.config, self.mesh, self.length = config, config.mesh(), length
        model_of = lambda: Transformer(config.transformer(parallelism), rngs=nnx.Rngs(config.seed))
        self._graph, shapes = nnx.split(nnx.eval_shape(model_of))
        transform = optimizer(config, max(config.steps, 1))
        params_at = shardings(shapes, self.mesh)
        state_at = shardings(jax.eval_shape(transform.init, shapes), self.mesh)
        self._tokens_at = NamedSharding(self.mesh, jax.sharding.PartitionSpec("data", None))
        make = lambda: nnx.split(model_of())[1]
        self._make = jax.jit(lambda: (make(), transform.init(make())), out_shardings=(params_at, state_at))

        def step(params: Any, state: Any, text: jax.Array) -> Any:
            def loss(params: Any) -> jax.Array:
                text32 = text.astype(jnp.int32)
                total = sharded_loss(nnx.merge(self._graph, params), self.mesh, text32[:, :-1], text32[:, 1:])
                return total / jnp.float32(text.shape[0] * (text.shape[1] - 1))

            value, gradients = jax.value_and_grad(loss)(params)
            with jax.numpy_dtype_promotion("standard"):  # Adam mixes its integer count with floats
                updates, state = transform.update(gradients, state, params)
            return jax.tree.map(jnp.add, params, updates), state, value

        placed = lambda tree, at: jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, at
        )
        text = jax.ShapeDtypeStruct((config.batch_size, length + 1), jnp.uint8, sharding=self._tokens_at)
        args = placed(shapes, params_at), placed(jax.eval_shape(transform.init, shapes), state_at), text
        whole = NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(params_at, state_at, whole))
        self._step = jitted.lower(*args).compile(compiler_options={**memjax.remat_compiler_options()})

    @classmethod
    def fitting(cls, config: MetpConfig, parallelism: str, length: int, limit: float = math.inf) -> "Training":
        """The fastest of the `variants` that takes no more memory than a device has, or `limit`; if none does, the smallest."""
        limits = [(device.memory_stats() or {}).get("bytes_limit", math.inf) for device in jax.local_devices()]
        for variant in variants(config, parallelism):
            training = cls(variant, parallelism, length)
            # All processes have to choose the same.
            if multihost_utils.process_allgather(np.asarray(training.bytes <= min(limit, *limits))).all():
                break
        return training

    @property
    def bytes(self) -> int:
        """Bytes of a device for a step: arguments, which results replace, and temporaries."""
        memory: Any = self._step.memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    def start(self) -> tuple[Any, Any]:
        return self._make()

    def batch(self, text: np.ndarray, step: int) -> jax.Array:
        """Windows cut at random, the same on every host, each of which takes its part."""
        starts = np.random.default_rng((self.config.seed, step)).integers(
            len(text) - self.length - 1, size=self.config.batch_size
        )
        whole = np.stack([text[s : s + self.length + 1] for s in starts])
        return jax.make_array_from_callback(whole.shape, self._tokens_at, lambda part: whole[part])

    def step(self, params: Any, state: Any, text: jax.Array) -> tuple[Any, Any, float]:
        params, state, loss = self._step(params, state, text)
        return params, state, float(loss)


def train(config: MetpConfig, text: np.ndarray, console: Console) -> None:
    training = Training.fitting(config, config.parallelism, config.length)
    params, state = training.start()
    with contextlib.closing(_log(config)) as log:
        for step in range(config.steps):
            begin = time.perf_counter()
            params, state, loss = training.step(params, state, training.batch(text, step))
            if not math.isfinite(loss):
                raise ExperimentError(
                    f"the loss is {loss} at step {step}; try a lower --learning-rate than {config.learning_rate}"
                )
            speed = config.batch_size * config.length / (time.perf_counter() - begin)
            log.append("train", step + 1, loss=loss, tokens_per_second=speed, bytes=training.bytes)
            if step % max(config.steps // 10, 1) == 0 or step + 1 == config.steps:
                console.print(f"step {step + 1:4d}   loss {loss:.4f} nats per byte   {speed:,.0f} tokens/s")


def _log(config: MetpConfig) -> records.Records:
    main = jax.process_index() == 0
    return records.Records(config.folder / "metrics.jsonl" if main else type(config.folder)(os.devnull))


def compare(config: MetpConfig, text: np.ndarray, console: Console) -> list[dict]:
    """Memory and speed of steps with each parallelism and length, and the longest length of each."""
    rows = []
    for name in config.compare:
        for length in config.compare_lengths:
            found = _try(config, name, length, text)
            console.print(f"{name}, sequences of {length:,} bytes: {_in_words(found)}")
            rows.append({"parallelism": name, "length": length, **(found or {"failed": "out of memory"})})
        if config.find_max_length:
            rows.append({"parallelism": name, "longest": find_longest(config, name, text)})
            console.print(f"{name}: longest sequence {rows[-1]['longest']:,}")
    return rows


def find_longest(config: MetpConfig, name: str, text: np.ndarray) -> int:
    """Bisected to a sixteenth. 0 if the shortest does not fit."""
    config = variants(config, name)[-1]  # that which takes least
    unit = 2 * (config.ring or jax.device_count())
    limit = config.memory_limit * _MIB if jax.default_backend() == "cpu" else None
    fits = lambda length: _try(config, name, length, text, steps=1, limit=limit) is not None
    low, high = 0, 16 * unit
    while high <= config.longest and fits(high):
        low, high = high, 2 * high
    high = min(high, config.longest + unit)
    while high - low > max(unit, low // 16):
        middle = (low + high) // 2 // unit * unit
        if middle in (low, high):
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _try(
    config: MetpConfig, name: str, length: int, text: np.ndarray, *, steps: int = 3, limit: int | None = None
) -> dict | None:
    """Bytes and tokens a second of real steps, or None if they do not fit: the device, or `limit` bytes of it."""
    for variant in variants(config, name):
        if (found := _try_variant(variant, name, length, text, steps, limit)) is not None:
            return found | ({"spent": variant.spend} if name == "metp" else {})
    return None


def _try_variant(
    config: MetpConfig, name: str, length: int, text: np.ndarray, steps: int, limit: int | None
) -> dict | None:
    try:
        training = Training(config, name, length)
        if limit is not None and training.bytes > limit:
            return None
        params, state = training.start()
        repeated = np.resize(text, max(len(text), length + 2))
        seconds = []
        for step in range(steps):
            batch = training.batch(repeated, step)
            begin = time.perf_counter()
            params, state, _ = training.step(params, state, batch)
            seconds.append(time.perf_counter() - begin)
        return {"bytes": training.bytes, "tokens_per_second": config.batch_size * length / min(seconds)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _in_words(found: dict | None) -> str:
    if found is None:
        return "out of memory"
    return f"{found['bytes'] / _MIB:,.1f} MiB, {found['tokens_per_second']:,.0f} tokens/s"


def show(config: MetpConfig, rows: list[dict], console: Console) -> None:
    lengths = config.compare_lengths
    table = Table(
        title=f"One training step on a ring of {config.ring or jax.device_count()}: MiB per device, and tokens/s"
    )
    table.add_column("")
    for length in lengths:
        table.add_column(f"{length:,} bytes", justify="right")
    table.add_column("longest", justify="right")
    figure, (memory, speed) = plt.subplots(1, 2, figsize=(9, 3.6))
    for name in config.compare:
        mine = [row for row in rows if row["parallelism"] == name]
        at = {row["length"]: row for row in mine if "bytes" in row}
        cells = [
            f"{at[n]['bytes'] / _MIB:,.1f}  {at[n]['tokens_per_second']:,.0f}" if n in at else "out of memory"
            for n in lengths
        ]
        longest = next((f"{row['longest']:,}" for row in mine if "longest" in row), "")
        table.add_row(name, *cells, longest)
        style = {"marker": "o", "label": name, "lw": 2.5 if name == "metp" else 1.2}
        memory.plot(list(at), [row["bytes"] / _MIB for row in at.values()], **style)
        speed.plot(list(at), [row["tokens_per_second"] for row in at.values()], **style)
    for axis, label in ((memory, "MiB per device"), (speed, "tokens/s")):
        axis.set(xscale="log", xlabel="bytes of a sequence", ylabel=label, ylim=(0, None))
        axis.set_xticks(list(lengths), [f"{n:,}" for n in lengths])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.spines[["top", "right"]].set_visible(False)
    memory.legend(frameon=False)
    plots.save(figure, config.folder / "parallelisms.png")
    console.print(table)
    console.print(f"In {config.folder}: metrics.jsonl, parallelisms.json, parallelisms.png", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 complete, 2 something to put right."""
    return exit_status(_main, argv)


def _main(argv: list[str]) -> int:
    config = parse(PRESETS, description=__doc__ or "", argv=argv)
    console = output()
    path = config.folder / "parallelisms.json"
    if not config.report_only:
        with files.locked(config.folder) if jax.process_index() == 0 else contextlib.nullcontext():
            if (config.folder / "config.json").exists():
                raise ExperimentError(f"{config.folder} holds a run already: choose another --name")
            multihost_utils.sync_global_devices("all hosts have looked before one writes")
            if jax.process_index() == 0:
                configs.save(config, config.folder / "config.json")
            text = standard_library().train
            if config.steps:
                train(config, text, console)
            rows = compare(config, text, console)
            if jax.process_index() == 0:
                files.write_text(path, json.dumps(rows, indent=1) + "\n")
    if jax.process_index() == 0 and config.compare:
        show(config, files.read_json(path, list, "measure again under another --name"), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
