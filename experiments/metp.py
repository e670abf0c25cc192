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

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from rich.console import Console

import memjax
from experiments.data.text import BYTES, check_windows, standard_library, train_windows, windows
from experiments.harness import config as configs
from experiments.harness import files
from experiments.harness.config import RunConfig
from experiments.harness.errors import ExperimentError
from experiments.harness.main import run
from experiments.harness.storage import folder
from experiments.harness.task import Task
from experiments.models import parallel
from experiments.models.transformer import TransformerConfig
from experiments.parallelism.comparison import compare, show
from experiments.parallelism.trial import layout, make_loss, model_of, variants

memjax.shard.hide_hops()

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
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("length", "dim", "layers", "heads"),
    )

    def validate(self) -> None:
        super().validate()
        if self.epochs != RunConfig.epochs:
            raise ExperimentError("--epochs: the length of this training is given by --steps")
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


def make_task(config: MetpConfig) -> Task:
    text = standard_library()
    check_windows(text, config.length, config.batch_size)
    mesh = config.mesh()
    fastest, *smaller = [
        functools.partial(model_of, one, config.parallelism) for one in variants(config, config.parallelism)
    ]
    return Task(
        make_model=fastest,
        smaller_models=smaller,
        loss=make_loss(mesh),
        train_batches=train_windows(
            text, length=config.length, batch_size=config.batch_size, seed=config.seed, hosts=1
        ),
        batch={"text": jax.ShapeDtypeStruct((config.batch_size, config.length + 1), jnp.uint8)},
        train_examples=windows(text.train, config.length),
        steps=config.steps,
        layout=layout(mesh),
    )


def _compare(config: MetpConfig, console: Console) -> None:
    rows = compare(config, standard_library().train, console)
    if jax.process_index() == 0:
        files.write_text(config.folder / "parallelisms.json", json.dumps(rows, indent=1) + "\n")


def _show(config: MetpConfig, console: Console) -> None:
    if config.compare:
        rows = files.read_json(config.folder / "parallelisms.json", list, "have it made again with --resume")
        show(config, rows, console)


def _only_compare(config: MetpConfig, console: Console) -> bool:
    """Without training, if there are no steps."""
    if config.steps:
        return False
    if not config.report_only:
        with folder.taken(config):
            if jax.process_index() == 0:
                configs.save(config, config.folder / "config.json")
            _compare(config, console)
    if jax.process_index() == 0:
        _show(config, console)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status is that of the harness: 0 complete, 130 stopped and saved, 2 something to put right."""
    return run(
        PRESETS,
        make_task,
        description=__doc__ or "",
        argv=argv,
        instead=_only_compare,
        afterwards=_compare,
        extra_report=_show,
    )


if __name__ == "__main__":
    sys.exit(main())
