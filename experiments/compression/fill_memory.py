"""The largest batches that fit, with and without compression, found by compiling."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

import memjax
from experiments.compression.controlled import controlled
from experiments.harness import devices, files
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.classification import classification_loss
from experiments.harness.loop.optimizer import optimizer
from experiments.harness.loop.step import init_state, train_step
from experiments.harness.reports import memory, plots
from memjax import compress

_GIB = 2**30
_TIMED_STEPS = 20


def fill_memory(config, make_model: Callable[..., nnx.Module], console: Console) -> None:
    """Print, and write to fill_memory.json, the largest batches within `config.fill_memory` GiB per device, with compression
    and without.

    The memory of a step is nearly a straight line over the batch: two programs give the line, and a third one checks the batch
    that it predicts. On a GPU the steps are timed, too. Capacities are `config.bits_per_value`, to be taken from a run; without
    it codes are larger than the values.
    """
    with files.writing(config.folder):
        config.folder.mkdir(parents=True, exist_ok=True)
    limit = config.fill_memory * _GIB
    rows = {}
    for name, is_compressed in (("uncompressed", False), ("compressed", True)):
        step_bytes = functools.partial(_compiled, config, make_model, is_compressed)
        small = config.batch_size
        few, many = (step_bytes(batch)[1] for batch in (small, 2 * small))
        per_example = (many - few) / small
        batch = int((limit - few) / per_example + small)
        quantum = len(jax.devices()) * (8 if batch > 64 else 1)
        batch -= batch % quantum
        if batch <= 0:
            raise ExperimentError(
                f"--fill-memory {config.fill_memory:g} GiB are less than {name} training of one example"
            )
        program, nbytes, state = step_bytes(batch)
        while nbytes > limit and batch > quantum:
            batch -= quantum
            program, nbytes, state = step_bytes(batch)
        rows[name] = {"batch": batch, "bytes": nbytes, "bytes_per_example": per_example}
        if jax.default_backend() == "gpu":
            rows[name]["examples_per_second"] = batch / _seconds(config, program, state, batch)
        console.print(f"{name}: {rows[name]}")
    table = Table(
        "", "batch", "GiB per device", "KiB per example", "examples/s", title=f"In {config.fill_memory:g} GiB"
    )
    for name, row in rows.items():
        speed = f"{row['examples_per_second']:.0f}" if "examples_per_second" in row else "not timed"
        cells = f"{row['batch']}", f"{row['bytes'] / _GIB:.2f}", f"{row['bytes_per_example'] / 1024:.0f}", speed
        table.add_row(name, *cells)
    console.print(table)
    files.write_text(config.folder / "fill_memory.json", json.dumps(rows, indent=2) + "\n")
    _draw(config.folder / "fill_memory.png", config, rows)
    console.print(f"In {config.folder}: fill_memory.json, fill_memory.png", soft_wrap=True)


def _draw(path: Path, config, rows: dict[str, dict]) -> None:
    """The largest batches and, if they were timed, their speeds: figure 11 of Jin et al. 2020."""
    fields = {"batch": "largest batch", "examples_per_second": "examples/s"}
    shown = [field for field in fields if all(field in row for row in rows.values())]
    figure, axes = plt.subplots(1, len(shown), figsize=(3.4 * len(shown), 3.2), squeeze=False)
    for axis, field in zip(axes[0], shown, strict=True):
        bars = axis.bar(list(rows), [row[field] for row in rows.values()], color=["0.6", "tab:blue"])
        axis.bar_label(bars, fmt="{:,.0f}")
        axis.set(ylabel=fields[field])
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{config.model} in {config.fill_memory:g} GiB, {len(jax.devices())} x {jax.devices()[0].device_kind}"
    )
    plots.save(figure, path)


def _compiled(config, make_model: Callable[..., nnx.Module], is_compressed: bool, batch: int):
    """The compiled step for this batch, its bytes per device, and what `_seconds` makes its state of."""
    config = dataclasses.replace(config, batch_size=batch)
    mesh = devices.data_mesh()
    tx = (controlled if is_compressed else optimizer)(config, 1000)
    model = functools.partial(make_model, config, is_compressed=is_compressed)
    loss = classification_loss(mean=(0.5,) * 3, std=(0.25,) * 3, label_smoothing=0.0)
    state = jax.eval_shape(functools.partial(init_state, model, tx))
    state = memory.placed(state, devices.replicated(mesh))
    shapes = {
        "image": jax.ShapeDtypeStruct((batch, config.image_size, config.image_size, 3), jnp.uint8),
        "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    options = memjax.remat_compiler_options() | memory.quick_compile()
    by_device = mesh if mesh.size > 1 else None
    step = train_step(model, loss, tx, 1, by_device, scale=compress.scale_gradient)
    jitted = jax.jit(step, donate_argnums=0, compiler_options=options)
    program = jitted.lower(state, memory.placed(shapes, devices.batch_sharding(mesh))).compile()
    analysis: Any = program.memory_analysis()
    needed = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    return program, needed - analysis.alias_size_in_bytes, (model, tx, mesh)


def _seconds(config, program, parts, batch: int) -> float:
    """Seconds per step."""
    model, tx, mesh = parts
    state = jax.jit(functools.partial(init_state, model, tx), out_shardings=devices.replicated(mesh))()
    shape = (batch, config.image_size, config.image_size, 3)
    images = jax.random.randint(jax.random.key(0), shape, 0, 255, jnp.uint8)
    inputs = {"image": images, "label": jnp.zeros(batch, jnp.int32)}
    inputs = jax.device_put(inputs, devices.batch_sharding(mesh))
    for _ in range(2):
        state, sums = program(state, inputs)
    jax.block_until_ready(sums)
    begin = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        state, sums = program(state, inputs)
    jax.block_until_ready(sums)
    return (time.perf_counter() - begin) / _TIMED_STEPS
