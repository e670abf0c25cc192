"""Where the memory of a training step goes, and what fits it into a budget: `memjax.explain` and `memjax.plan`.

    python experiments/plan.py

Explains a small Transformer and a ResNet, module by module; plans each for a row of budgets between the least memory and what
it takes anyhow; and compares what was predicted with what the compiler takes, and with the time of real steps. Two to three
minutes on two CPU cores. For one budget, or larger models:

    python experiments/plan.py --budgets 24MiB
    python experiments/plan.py --models resnet --resnet.blocks 3 4 6 3 --resnet.image-size 224 --batch-size 64
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

import memjax
from experiments.harness import files
from experiments.harness.console import exit_status, output
from experiments.harness.errors import ExperimentError
from experiments.harness.reports import plots
from experiments.harness.reports.plots import plt
from experiments.models.classifiers import ResNet
from experiments.models.transformer import Transformer, TransformerConfig
from memjax._core import check
from memjax._core.check import readable_bytes

_MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """A decoder of the Llama family, over bytes, with all its logits."""

    layers: int = 4
    dim: int = 64
    heads: int = 4
    hidden: int = 256
    vocabulary: int = 512
    length: int = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetSizes:
    """A ResNet of bottleneck blocks."""

    blocks: tuple[int, ...] = (1, 1, 1)
    """How many at each size."""
    width: float = 0.25
    """Scales the 64 channels of the first convolution, and all others."""
    image_size: int = 64
    classes: int = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to explain and to plan."""

    models: tuple[Literal["transformer", "resnet"], ...] = ("transformer", "resnet")
    batch_size: int = 16
    """Sequences, or images, of a step."""
    transformer: TransformerSizes = TransformerSizes()
    resnet: ResNetSizes = ResNetSizes()
    budgets: tuple[str, ...] = ()
    """Such as 24MiB or 40GiB; "min" is the least memory. Default: "min" and as many as --points between it and the most."""
    points: int = 4
    """How many budgets there are if --budgets does not say."""
    runs: int = 5
    """Steps to time for each plan, of which the median counts; 0: none."""
    name: str | None = None
    """Name of the run; its files are in RUNS_DIR/NAME. Default: plan and the time."""
    runs_dir: Path = Path("runs")

    def validate(self) -> None:
        """Raises ExperimentError for values that cannot be run with."""
        if not self.models:
            raise ExperimentError("--models must name at least one of transformer and resnet")
        for name, least in (("batch_size", 1), ("points", 1), ("runs", 0)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ExperimentError(f"--{flag} must be at least {least}, got {getattr(self, name)}")
        for budget in self.budgets:
            try:
                check.byte_count("--budgets", budget, words=("min",))
            except ValueError as error:
                raise ExperimentError(str(error)) from error
        for sizes in (self.transformer, self.resnet):
            for name, value in vars(sizes).items():
                if min(value if isinstance(value, tuple) else (value,), default=0) <= 0:
                    flag = f"--{type(sizes).__name__.removesuffix('Sizes').lower()}.{name.replace('_', '-')}"
                    raise ExperimentError(f"{flag} must be positive, got {value}")


class Step(NamedTuple):
    """A loss and its arguments, the first of which is differentiated."""

    loss: Callable[..., Any]
    args: tuple[Any, ...]


def transformer(config: PlanConfig) -> Step:
    """The mean cross-entropy of random tokens."""
    sizes = config.transformer
    try:
        shape = TransformerConfig(sizes.vocabulary, sizes.dim, sizes.layers, sizes.heads, sizes.heads, sizes.hidden)
    except ValueError as error:
        raise ExperimentError(f"--transformer.{error}") from error
    graph, params = nnx.split(Transformer(shape, rngs=nnx.Rngs(0)))

    def loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        logits = model(tokens[:, :-1]) @ model.head.T
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    shape_of_tokens = (config.batch_size, sizes.length + 1)
    return Step(loss, (params, jax.random.randint(jax.random.key(1), shape_of_tokens, 0, sizes.vocabulary)))


def resnet(config: PlanConfig) -> Step:
    """The mean cross-entropy of random images, and the batch statistics."""
    sizes = config.resnet
    model = ResNet(
        sizes.blocks,
        sizes.classes,
        bottleneck=True,
        image_size=sizes.image_size,
        width=sizes.width,
        rngs=nnx.Rngs(0),
    )
    parts: Any = nnx.split(model, nnx.Param, ...)
    graph, params, rest = parts

    def loss(params: nnx.State, rest: nnx.State, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, nnx.State]:
        model = nnx.merge(graph, params, rest, copy=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return jnp.mean(losses), nnx.state(model, nnx.BatchStat)

    images = jax.random.normal(jax.random.key(1), (config.batch_size, sizes.image_size, sizes.image_size, 3))
    return Step(loss, (params, rest, images, jnp.arange(config.batch_size) % sizes.classes))


MODELS: dict[str, Callable[[PlanConfig], Step]] = {"transformer": transformer, "resnet": resnet}


def measure(step: Step, config: PlanConfig, console: Console) -> list[dict[str, Any]]:
    """One row for the step as it is, and one for each budget."""
    unchanged = _compiled(step.loss, step)
    rows: list[dict[str, Any]] = [
        {"budget": None, "compiled_bytes": _temp(unchanged), "milliseconds": _milliseconds(unchanged, step, config)}
    ]
    budgets: Sequence[str | int] = config.budgets
    if not budgets:
        least = memjax.plan(step.loss, *step.args, budget="min")
        most = max(least.frontier()[-1].nbytes, least.nbytes + 1)
        budgets = [
            "min",
            *(int(least.nbytes + (most - least.nbytes) * i / config.points) for i in range(1, config.points + 1)),
        ]
    for budget in budgets:
        start = time.perf_counter()
        try:
            plan = memjax.plan(step.loss, *step.args, budget=budget)
        except ValueError as error:
            raise ExperimentError(f"--budgets: {error}") from error
        seconds = time.perf_counter() - start
        program = _compiled(memjax.planned(step.loss, plan=plan), step)
        rows.append(
            {
                "budget": plan.budget,
                "first_predicted_bytes": plan.first_nbytes,
                "predicted_bytes": plan.nbytes,
                "compiled_bytes": _temp(program),
                "predicted_ratio": plan.seconds / plan.plain_seconds,
                "milliseconds": _milliseconds(program, step, config),
                "planning_seconds": seconds,
                "plan": json.loads(plan.to_json()),
            }
        )
        console.print(
            f"{readable_bytes(plan.budget)}: compiled {readable_bytes(rows[-1]['compiled_bytes'])}, planned in {seconds:.1f} s"
        )
    return rows


def _compiled(loss: Callable[..., Any], step: Step) -> Any:
    has_aux = isinstance(jax.eval_shape(loss, *step.args), tuple)
    differentiated = jax.value_and_grad(loss, has_aux=has_aux)
    return jax.jit(differentiated, compiler_options=memjax.remat_compiler_options()).lower(*step.args).compile()


def _temp(program: Any) -> int:
    return int(program.memory_analysis().temp_size_in_bytes)


def _milliseconds(program: Any, step: Step, config: PlanConfig) -> float | None:
    """The median of the runs, after one more."""
    times = []
    for _ in range(config.runs + 1 if config.runs else 0):
        start = time.perf_counter()
        jax.block_until_ready(program(*step.args))
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times[1:])) if times else None


def show(name: str, rows: Sequence[dict[str, Any]], folder: Path, console: Console) -> None:
    """The table, and the curves as a picture."""
    table = Table(title=f"{name}: temporary memory of one step")
    for column in ("budget", "model alone", "planned", "compiled", "time, predicted", "time, ms"):
        table.add_column(column, justify="right")
    for row in rows:
        predicted = [
            readable_bytes(row[key]) if key in row else "" for key in ("first_predicted_bytes", "predicted_bytes")
        ]
        ratio = f"{row['predicted_ratio']:.3f}" if "predicted_ratio" in row else ""
        ms = "" if row["milliseconds"] is None else f"{row['milliseconds']:.1f}"
        budget = "none" if row["budget"] is None else readable_bytes(row["budget"])
        table.add_row(budget, *predicted, readable_bytes(row["compiled_bytes"]), ratio, ms)
    console.print(table)
    plans = [row for row in rows if row["budget"] is not None]
    first = [abs(row["first_predicted_bytes"] / row["compiled_bytes"] - 1) for row in plans]
    over = sum(row["compiled_bytes"] > row["budget"] for row in plans)
    console.print(
        f"{name}: compiled bytes are {100 * np.median(first):.1f}% off what the model alone predicted (median); "
        f"{over} of {len(plans)} plans above their budget"
    )
    draw(name, rows, folder / f"{name}_plans.png")


def draw(name: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Left the frontier and the plans, by predicted time; right compiled bytes over predicted ones."""
    plain, plans = rows[0], [row for row in rows if row["budget"] is not None]
    figure, (curve, bytes_axis) = plt.subplots(1, 2, figsize=(9.6, 3.8))
    points = plans[0]["plan"]["points"]
    base = plans[0]["plan"]["plain_seconds"]
    curve.step(
        [nbytes / _MIB for nbytes, _ in points],
        [s / base for _, s in points],
        where="post",
        color="0.6",
        label="predicted",
    )
    nbytes = [row["compiled_bytes"] / _MIB for row in plans]
    curve.plot(nbytes, [row["predicted_ratio"] for row in plans], "o", color="0.3", label="plans, predicted time")
    if plain["milliseconds"] is not None:
        curve.plot(
            nbytes, [row["milliseconds"] / plain["milliseconds"] for row in plans], "s", label="plans, measured time"
        )
        curve.plot(plain["compiled_bytes"] / _MIB, 1.0, "*", ms=11, color="black", label="no plan")
    curve.set(xlabel="temporary memory, MiB", ylabel="time of a step, relative", title=name)
    styles: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("first_predicted_bytes", "model alone", {"marker": "o", "mfc": "none"}),
        ("predicted_bytes", "plan", {"marker": "s", "ms": 4}),
    )
    for key, label, style in styles:
        bytes_axis.plot([row[key] / _MIB for row in plans], nbytes, ls="", label=label, **style)
    top = 1.1 * max(*nbytes, *(row["first_predicted_bytes"] / _MIB for row in plans))
    bytes_axis.plot([0, top], [0, top], color="0.7", lw=1)
    bytes_axis.set(xlabel="predicted, MiB", ylabel="compiled, MiB", xlim=(0, top), ylim=(0, top))
    for axis in (curve, bytes_axis):
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    plots.save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 complete, 2 something to put right."""
    return exit_status(_main, argv)


def _main(argv: list[str]) -> int:
    config = tyro.cli(PlanConfig, args=argv, description=__doc__)
    config.validate()
    console = output()
    name = config.name or f"plan-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = config.runs_dir / name
    with files.locked(folder):
        if (folder / "plans.json").exists():
            raise ExperimentError(f"{folder} holds a run already: choose another --name")
        found: dict[str, Any] = {}
        for model in dict.fromkeys(config.models):
            step = MODELS[model](config)
            explanation = memjax.explain(step.loss, *step.args)
            console.print(f"{model}: where the memory goes")
            console.print(explanation)
            files.write_text(folder / f"{model}_explained.json", explanation.to_json())
            explanation.plot(folder / f"{model}_explained.png")
            found[model] = measure(step, config, console)
            files.write_text(folder / "plans.json", json.dumps(found) + "\n")
            show(model, found[model], folder, console)
        console.print(
            f"In {folder}: plans.json, and for each model NAME_explained.json, .png and NAME_plans.png", soft_wrap=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
