"""Models that others published, trained as they are and compressed: `python -m benchmarks.public_models --models-path PATH`.

PATH is a folder with Flax's `examples` and Bonsai's `bonsai`: in clones of `google/flax` and `jax-ml/bonsai`,
`mkdir public; cp -r flax/examples bonsai/bonsai public`. The models are compressed by `memjax.compressed(model)`, all defaults.

For each model and several seeds:

- plain: the model as it is;
- compressed: the compressed model with the same initial parameters, batches, dropout and noise;
- reordered: the model as it is with the same initial parameters, but other batches, dropout and noise, to show what chance does.

Rows have the loss over training, the mean of its last tenth and the difference from plain training with the same seed; the
relative error of a batch's gradient before and after plain training, and for scale the distance between gradients of two
batches; bytes saved for the backward pass; temporary memory and time of a step. `--smoke` tries all of it on a CPU.

`--write-data FILE` only writes the data, for `--data FILE` on a machine without scikit-image and grain.
`--figure` only draws `docs/public_models.png` of the results.
"""

import dataclasses
import functools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import memjax
from benchmarks import record
from benchmarks.cases.public_models import CASES, Case, digest, make_data

_KINDS = ("plain", "compressed", "reordered")
_WRAPS: dict[str, Callable[[Any], Any]] = {"plain": lambda model: model, "compressed": memjax.compressed}
_OTHER_ORDER = 1000  # added to the seed
_POINTS = 40  # of a curve
_FIGURE = pathlib.Path(__file__).parent.parent / "docs" / "public_models.png"


@dataclasses.dataclass(frozen=True)
class Config:
    models_path: pathlib.Path = pathlib.Path("public")
    """A folder with Flax's `examples` and Bonsai's `bonsai`."""
    models: tuple[str, ...] = tuple(CASES)
    seeds: int = 8
    steps: int = 400
    """Steps of each training."""
    seconds: float = 210.0
    """Time for all models, in equal parts. After a model's first two seeds none begins that would end later."""
    smoke: bool = False
    """Small models and few steps of two seeds; the results are not saved."""
    data: pathlib.Path | None = None
    """A file that --write-data wrote; without it the data are made anew."""
    write_data: pathlib.Path | None = None
    figure: bool = False
    name: str = "public_models"


def main(config: Config) -> None:
    console = Console(width=130)
    if config.figure:
        _draw(json.loads((record.RESULTS / f"{config.name}.json").read_text()))
        return
    if config.write_data is not None:
        np.savez_compressed(config.write_data, allow_pickle=False, **make_data())
        return
    if unknown := sorted(set(config.models) - set(CASES)):
        raise SystemExit(f"--models must be some of {', '.join(CASES)}, got {', '.join(unknown)}")
    if config.smoke:
        config = dataclasses.replace(config, seeds=2, steps=20)
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    data = make_data() if config.data is None else dict(np.load(config.data))
    for i, name in enumerate(config.models):
        case = CASES[name](config.models_path, data, config.smoke)
        end = begin + config.seconds * (i + 1) / len(config.models)
        console.print(f"[bold]{name}[/bold]")
        measured = measure(case, config.seeds, config.steps, end, console)
        rows.append({"model": name, "files": digest(config.models_path, case.files), "steps": config.steps} | measured)
        if not config.smoke:
            record.save(config.name, rows)
    console.print(_table(rows))
    if not all(math.isfinite(one["final"]) for row in rows for one in row["trainings"]):
        raise SystemExit("some losses are not finite")


class _Programs(NamedTuple):
    """Compiled functions.

    Attributes:
      start: seed -> parameters, other variables, optimiser's state.
      gradients: for "plain" and "compressed": parameters, other variables, batch, key -> (loss, other variables), gradient.
      update: parameters, optimiser's state, gradient -> parameters, optimiser's state.
      apart: gradients a, b -> |a - b| / |b|.
    """

    start: Any
    gradients: dict[str, Any]
    update: Any
    apart: Any


def measure(case: Case, seeds: int, steps: int, end: float, console: Console) -> dict[str, Any]:
    """The row of a model; `end` is a time of `time.monotonic`."""
    began = time.monotonic()
    programs, sizes = _compiled(case, steps)
    console.print(f"compiled in {time.monotonic() - began:.0f} s")
    trainings: list[dict] = []
    gradients: list[dict] = []
    longest = 0.0
    for seed in range(seeds):
        started = time.monotonic()
        if seed > 1 and started + longest > end:
            break
        # No kind is always the first.
        for kind in _KINDS if seed % 2 == 0 else _KINDS[::-1]:
            training, errors = _train(case, programs, kind, seed, steps)
            trainings.append({"seed": seed, "kind": kind} | training)
            if kind == "plain":
                gradients.append({"seed": seed} | errors)
        finals = ", ".join(f"{kind} {_final(trainings, kind)[-1]:.4f}" for kind in _KINDS)
        console.print(f"seed {seed} in {time.monotonic() - started:.0f} s: {finals}")
        longest = max(longest, time.monotonic() - started)
    return sizes | {"batch": case.batch, "trainings": trainings, "gradients": gradients} | _differences(trainings)


def _compiled(case: Case, steps: int) -> tuple[_Programs, dict[str, Any]]:
    """The programs, and the memory that gradients need."""
    optimizer = case.optimizer(steps)

    def start(seed):
        params, variables = case.init(seed)
        return params, variables, optimizer.init(params)

    def update(params, state, gradient):
        changes, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), state

    def apart(a, b):
        return optax.tree.norm(jax.tree.map(jnp.subtract, a, b)) / optax.tree.norm(b)

    lowered = jax.jit(start).lower(jnp.int32(0))
    params, variables, state = lowered.out_info
    key = jax.random.key(0)
    batch = {
        name: jax.ShapeDtypeStruct((case.batch, *array.shape[1:]), array.dtype) for name, array in case.data.items()
    }

    def gradient(kind: str) -> Any:
        value_and_gradient = jax.value_and_grad(case.loss(_WRAPS[kind]), has_aux=True)
        return jax.jit(value_and_gradient).lower(params, variables, batch, key).compile()

    def saved(kind: str) -> int | None:
        loss = functools.partial(case.loss(_WRAPS[kind]), key=key)
        return memjax.measure(loss, params, variables, batch).residual_bytes

    with ThreadPoolExecutor() as pool:
        started, updated = (pool.submit(one.compile) for one in (lowered, jax.jit(update).lower(params, state, params)))
        apart_compiled = pool.submit(jax.jit(apart).lower(params, params).compile)
        residuals = dict(zip(_WRAPS, pool.map(saved, _WRAPS), strict=True))
        start_program, update_program = started.result(), updated.result()
        apart_program = apart_compiled.result()
    # One after the other: a GPU's compiler chooses kernels by their times.
    gradients = {kind: gradient(kind) for kind in _WRAPS}
    programs = _Programs(start_program, gradients, update_program, apart_program)
    sizes = {
        kind: {
            "residual_bytes": residuals[kind],
            "temp_bytes": getattr(program.memory_analysis(), "temp_size_in_bytes", None),
        }
        for kind, program in gradients.items()
    }
    return programs, sizes


def _train(case: Case, programs: _Programs, kind: str, seed: int, steps: int) -> tuple[dict, dict]:
    """Losses of a training; and, if it is plain, the errors of gradients before and after it."""
    order = seed + (_OTHER_ORDER if kind == "reordered" else 0)
    rng = np.random.default_rng(order)
    batches = [rng.integers(len(next(iter(case.data.values()))), size=case.batch) for _ in range(steps + 2)]
    keys = list(jax.random.split(jax.random.key(order), steps + 2))
    batch_and_key = lambda step: ({name: array[batches[step]] for name, array in case.data.items()}, keys[step])
    gradient = programs.gradients["compressed" if kind == "compressed" else "plain"]

    def errors() -> dict[str, float]:
        """Errors of gradients on two batches that are not trained on."""
        plain, compressed = (programs.gradients[name](params, variables, *batch_and_key(steps))[1] for name in _WRAPS)
        other = programs.gradients["plain"](params, variables, *batch_and_key(steps + 1))[1]
        return {
            "compressed": float(programs.apart(compressed, plain)),
            "another_batch": float(programs.apart(other, plain)),
        }

    params, variables, state = programs.start(jnp.int32(seed))
    first = errors() if kind == "plain" else {}
    losses, began = [], time.perf_counter()
    for step in range(steps):
        (loss, variables), loss_gradient = gradient(params, variables, *batch_and_key(step))
        params, state = programs.update(params, state, loss_gradient)
        losses.append(loss)
    curve_of_losses = np.array(jax.device_get(losses), np.float64)
    ms = (time.perf_counter() - began) / steps * 1e3
    windows = np.array_split(curve_of_losses, min(_POINTS, steps))
    curve = [round(float(window.mean()), 5) for window in windows]
    final = float(curve_of_losses[-max(1, steps // 10) :].mean())
    gradients = {"first": first, "last": errors()} if kind == "plain" else {}
    return {"final": final, "ms_per_step": round(ms, 3), "curve": curve}, gradients


def _final(trainings: list[dict], kind: str) -> list[float]:
    return [one["final"] for one in trainings if one["kind"] == kind]


def _differences(trainings: list[dict]) -> dict[str, Any]:
    """Final losses less plain's, seed by seed: mean, its standard error, and the standard deviation over seeds."""
    plain = _final(trainings, "plain")
    differences: dict[str, Any] = {"seeds": len(plain), "plain_deviation": statistics.stdev(plain)}
    for kind in _KINDS[1:]:
        less_plain = [loss - plain_loss for loss, plain_loss in zip(_final(trainings, kind), plain, strict=True)]
        deviation = statistics.stdev(less_plain)
        differences[f"{kind}_less_plain"] = {
            "mean": statistics.mean(less_plain),
            "error": deviation / len(less_plain) ** 0.5,
            "deviation": deviation,
        }
    return differences


def _table(rows: list[dict]) -> Table:
    columns = ("", "seeds", "final loss, plain", "compressed, less plain", "reordered, less plain")
    table = Table(*columns, "gradient's error", "another batch's", "saved", "step")
    for row in rows:
        differences = [record.mean_and_error(_final(row["trainings"], "plain"), 4)]
        for kind in _KINDS[1:]:
            pairs = zip(_final(row["trainings"], kind), _final(row["trainings"], "plain"), strict=True)
            differences.append(record.mean_and_error([loss - plain for loss, plain in pairs], 5))
        errors = [
            " to ".join(
                f"{statistics.mean(errors[when][kind] for errors in row['gradients']):.4f}"
                for when in ("first", "last")
            )
            for kind in ("compressed", "another_batch")
        ]
        saved = row["compressed"]["residual_bytes"] / row["plain"]["residual_bytes"]
        ms = {kind: statistics.median(_values(row, kind, "ms_per_step")) for kind in _WRAPS}
        step = f"{ms['plain']:.1f} to {ms['compressed']:.1f} ms"
        table.add_row(row["model"], str(row["seeds"]), *differences, *errors, f"{saved:.3f}", step)
    return table


def _values(row: dict, kind: str, name: str) -> list:
    return [one[name] for one in row["trainings"] if one["kind"] == kind]


def _draw(results: dict) -> None:
    """Draw each seed's curves, plain and compressed, and below them differences from plain, of another order of batches, too."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    rows = results["rows"]
    drawn, axes = plt.subplots(2, len(rows), figsize=(3.4 * len(rows), 5.6), layout="constrained", squeeze=False)
    for row, (above, below) in zip(rows, axes.T, strict=True):
        curves = {kind: np.array(_values(row, kind, "curve")) for kind in _KINDS}
        steps = (np.arange(curves["plain"].shape[1]) + 0.5) * row["steps"] / curves["plain"].shape[1]
        for kind, style in (("plain", {"color": "black"}), ("compressed", {"color": "tab:red", "linestyle": "--"})):
            above.plot(steps, curves[kind].T, linewidth=0.8, alpha=0.6, **style)
            above.plot([], [], label=kind, **style)
        for kind, colour in (("reordered", "tab:grey"), ("compressed", "tab:red")):
            below.plot(steps, (curves[kind] - curves["plain"]).T, color=colour, linewidth=0.8, alpha=0.5)
            below.plot(steps, (curves[kind] - curves["plain"]).mean(0), color=colour, label=f"{kind}, less plain")
        above.set(title=row["model"], yscale="log", ylabel="training loss")
        below.set(xlabel="step", ylabel="difference of losses")
        for one in (above, below):
            one.legend(frameon=False, fontsize="small")
            one.spines[["top", "right"]].set_visible(False)
    drawn.savefig(_FIGURE, dpi=110)
    plt.close(drawn)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
