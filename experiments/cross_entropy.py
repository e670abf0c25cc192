"""The loss of a language model without its logits (mgmalek, "Memory-efficient cross entropy loss").

    python experiments/cross_entropy.py

Draws the figure of that work, memory and time of a linear layer with cross-entropy against the number of chunks, and trains
a byte-level Transformer on the source of Python's standard library twice, with `memjax.linear_cross_entropy` and with all
logits: the loss curves are the same. A few minutes on two CPU cores.
"""

import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from matplotlib import pyplot as plt
from rich.console import Console

import memjax
from experiments.data.text import BYTES, check_windows, standard_library, test_windows, train_windows, windows
from experiments.harness import files
from experiments.harness.config import RunConfig, parse
from experiments.harness.console import exit_status, output
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.step import Loss
from experiments.harness.main import run
from experiments.harness.reports import plots
from experiments.harness.storage import records
from experiments.harness.task import Task
from experiments.models.transformer import Transformer, TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig(RunConfig):
    """The Transformer, its loss, and the figure."""

    length: int = 256
    """Bytes of a sequence."""
    dim: int = 128
    """Width of the Transformer."""
    layers: int = 3
    """Each of attention and feed-forward."""
    heads: int = 4
    """Heads of queries; half as many of keys and values."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation; parameters are float32."""
    loss: Literal["memjax", "plain"] = "memjax"
    """memjax: without the logits. plain: with all of them."""
    loss_chunk: int = 512
    """Tokens whose logits memjax holds at a time."""
    compare: bool = True
    """Also train with the plain loss, and draw both."""
    figure_tokens: int = 1024
    """Tokens of the figure."""
    figure_vocabulary: int = 8192
    """Vocabulary of the figure."""
    figure_dims: tuple[int, ...] = (128, 512, 2048)
    """Widths of the figure, a column each; none: no figure."""
    figure_chunks: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Numbers of chunks of the figure."""

    experiment: ClassVar[str] = "cross_entropy"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("length", "dim", "layers", "heads"),
    )

    def validate(self) -> None:
        super().validate()
        for name in ("length", "dim", "layers", "heads", "loss_chunk", "figure_tokens", "figure_vocabulary"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if min((*self.figure_dims, *self.figure_chunks), default=1) < 1:
            raise ExperimentError("--figure-dims and --figure-chunks must be at least 1")
        try:
            self.transformer()
        except ValueError as error:
            raise ExperimentError(f"--{error}") from error

    def transformer(self) -> TransformerConfig:
        return TransformerConfig(
            vocabulary=BYTES,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=max(self.heads // 2, 1),
            hidden=5 * self.dim // 2,
            dtype=self.dtype,
        )


_adamw = functools.partial(CrossEntropyConfig, optimizer="adamw", schedule="cosine", weight_decay=0.0)
PRESETS = {
    "cpu": _adamw(preset="cpu", epochs=0.045, batch_size=16, learning_rate=3e-3),
    "gpu": _adamw(
        preset="gpu", epochs=1, batch_size=64, learning_rate=1e-3, length=1024, dim=512, layers=8, heads=8,
        dtype="bfloat16", loss_chunk=8192, log_every=10, figure_tokens=8192, figure_vocabulary=65536,
        figure_dims=(512, 2048, 4096),
    ),
}  # fmt: skip


def make_task(config: CrossEntropyConfig) -> Task:
    text = standard_library()
    check_windows(text, config.length, config.batch_size)
    shape = {"length": config.length, "batch_size": config.batch_size}
    loss = memjax_loss(config.loss_chunk) if config.loss == "memjax" else plain_loss
    return Task(
        make_model=lambda: Transformer(config.transformer(), rngs=nnx.Rngs(config.seed)),
        loss=loss,
        test_loss=loss,
        train_batches=train_windows(text, seed=config.seed, **shape),
        test_batches=functools.partial(test_windows, text, **shape),
        batch={"text": jax.ShapeDtypeStruct((config.batch_size, config.length + 1), jnp.uint8)},
        train_examples=windows(text.train, config.length),
    )


def memjax_loss(chunk: int) -> Loss:
    def sums(model, batch):
        text = batch["text"].astype(jnp.int32)
        x = model(text[:, :-1])
        loss, aux = memjax.linear_cross_entropy(
            x, model.head, text[:, 1:], reduction="sum", chunk=chunk, return_aux=True
        )
        count = aux.valid_count.astype(jnp.float32)
        return {"loss": loss, "top1": aux.accuracy * count, "count": count}

    return sums


def plain_loss(model, batch):
    text = batch["text"].astype(jnp.int32)
    x = model(text[:, :-1])
    logits = jnp.einsum("btd,vd->btv", x, model.head, preferred_element_type=jnp.float32)
    labels = text[:, 1:]
    own = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return {
        "loss": jnp.sum(jax.nn.logsumexp(logits, -1) - own),
        "top1": jnp.sum((own >= logits.max(-1)).astype(jnp.float32)),
        "count": jnp.float32(labels.size),
    }


# The figure


def chunk_rows(config: CrossEntropyConfig, console: Console) -> list[dict]:
    """Temporary bytes, compiled, and seconds of loss, dx and dW, for each width: all logits, then chunks of tokens."""
    rows = []
    for dim in config.figure_dims:
        keys = jax.random.split(jax.random.key(0), 3)
        dtype = jnp.dtype(config.dtype)
        x = jax.random.normal(keys[0], (config.figure_tokens, dim), dtype)
        w = jax.random.normal(keys[1], (config.figure_vocabulary, dim), dtype) * jnp.asarray(dim**-0.5, dtype)
        labels = jax.random.randint(keys[2], (config.figure_tokens,), 0, config.figure_vocabulary)
        losses: dict[int, Callable] = {0: _all_logits}
        for chunks in config.figure_chunks:
            chunk = -(-config.figure_tokens // chunks)
            losses[chunks] = functools.partial(memjax.linear_cross_entropy, chunk=chunk, implementation="forward_grad")
        for chunks, loss in losses.items():
            step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), compiler_options=memjax.remat_compiler_options())
            compiled = step.lower(x, w, labels).compile()
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                jax.block_until_ready(compiled(x, w, labels))
                times.append(time.perf_counter() - begin)
            memory: Any = compiled.memory_analysis()
            temp = memory.temp_size_in_bytes
            rows.append({"dim": dim, "chunks": chunks, "temp_bytes": temp, "seconds": statistics.median(times)})
            name = f"{chunks} chunks" if chunks else "all logits"
            console.print(f"D = {dim}, {name}: {temp / 2**20:.1f} MiB, {rows[-1]['seconds'] * 1e3:.0f} ms")
    return rows


def _all_logits(x, w, labels):
    logits = jnp.einsum("nd,vd->nv", x, w).astype(jnp.float32)
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]).mean()


def draw_chunks(rows: list[dict], title: str, path: Path) -> None:
    dims = sorted({row["dim"] for row in rows})
    figure, axes = plt.subplots(2, len(dims), figsize=(1 + 3 * len(dims), 5), sharex=True, squeeze=False)
    for column, dim in enumerate(dims):
        found = [row for row in rows if row["dim"] == dim]
        full = next(row for row in found if row["chunks"] == 0)
        chunked = [row for row in found if row["chunks"]]
        for axis, key, unit in ((axes[0][column], "temp_bytes", 2**-20), (axes[1][column], "seconds", 1e3)):
            axis.axhline(full[key] * unit, color="C0", label="all logits")
            line = [row[key] * unit for row in chunked]
            axis.plot([row["chunks"] for row in chunked], line, color="C1", marker="o", label="memjax")
            axis.set(xscale="log", ylim=(0, None))
            axis.set_xticks([row["chunks"] for row in chunked], [str(row["chunks"]) for row in chunked], minor=False)
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
        axes[0][column].set_title(f"D = {dim}")
        axes[1][column].set_xlabel("chunks")
    axes[0][0].set_ylabel("temporary memory, MiB")
    axes[1][0].set_ylabel("ms, loss and gradients")
    axes[0][-1].legend(frameon=False)
    figure.suptitle(title)
    plots.save(figure, path)


# The two trainings


def compare_losses(config: CrossEntropyConfig, other: CrossEntropyConfig, console: Console) -> None:
    """Draws both loss curves into one plot and prints how far they are apart."""
    ours, plain = (records.read(c.folder / "metrics.jsonl", "train") for c in (config, other))
    by_step = {row["step"]: row["loss"] for row in plain}
    both = [(row["step"], row["loss"], by_step[row["step"]]) for row in ours if row["step"] in by_step]
    if not both:
        raise ExperimentError(f"nothing to compare: {config.folder} and {other.folder} have no step in common")
    steps, a, b = zip(*both, strict=True)
    largest = max(abs(x - y) for x, y in zip(a, b, strict=True))
    console.print(f"Largest difference of the two loss curves over {len(both)} records: {largest:.2e} nats per byte")
    figure, (curves, gap) = plt.subplots(2, 1, figsize=(6.4, 5), sharex=True, height_ratios=(3, 1))
    curves.plot(steps, b, lw=3, alpha=0.4, label="all logits")
    curves.plot(steps, a, lw=1, color="black", ls="--", label="memjax")
    curves.set(ylabel="training loss, nats per byte")
    curves.legend(frameon=False)
    gap.plot(steps, [x - y for x, y in zip(a, b, strict=True)], ".")
    gap.set(xlabel="step", ylabel="difference")
    for axis in (curves, gap):
        axis.spines[["top", "right"]].set_visible(False)
    plots.save(figure, config.folder / "losses.png")
    console.print(f"In {config.folder}: losses.png", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status is that of the harness: 0 complete, 130 stopped and saved, 2 something to put right."""
    return exit_status(_main, argv)


def _main(argv: list[str]) -> int:
    config = parse(PRESETS, description=__doc__ or "", argv=argv)
    console = output()
    once = functools.partial(run, PRESETS, make_task, description=__doc__ or "")
    if status := once(argv=[*argv, "--name", str(config.name)]):
        return status
    if config.compare and config.loss == "memjax":
        other = dataclasses.replace(config, name=f"{config.name}-plain", loss="plain")
        flags = [flag for flag in argv if flag != "--resume"]
        if config.resume and (other.folder / "config.json").exists():
            flags.append("--resume")
        if status := once(argv=[*flags, "--name", str(other.name), "--loss", "plain"]):
            return status
        if jax.process_index() == 0:
            compare_losses(config, other, console)
    if config.figure_dims and jax.process_index() == 0:
        path = config.folder / "chunks.json"
        if not config.report_only:
            files.write_text(path, json.dumps(chunk_rows(config, console), indent=1) + "\n")
        title = f"{config.figure_tokens:,} tokens, vocabulary {config.figure_vocabulary:,}, {config.dtype}"
        rows = files.read_json(path, list, "have it made again with --resume")
        draw_chunks(rows, title, config.folder / "chunks.png")
        console.print(f"In {config.folder}: chunks.png", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
