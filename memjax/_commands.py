"""The commands of `python -m memjax`: what `memjax.explain` and `memjax.jit` say of a step, without a program around them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.text import Text

from memjax._core import check
from memjax._core.check import readable_bytes
from memjax._core.clear_errors import is_own
from memjax._explain.explain import explain
from memjax._explain.explanation import Table, as_rich, as_text
from memjax._jit.account import BudgetError
from memjax._jit.jit import Jitted, jit
from memjax._jit.step_plan import StepPlan, StepPoint

_ROWS = 12  # of a frontier
_WANTED = "(step, arguments), a function and a tuple of what it is called with"

Factory = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PACKAGE.MODULE:FACTORY")]
File = Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE")]


class CommandError(ValueError):
    """Something in a command that its user can put right."""


@dataclasses.dataclass(frozen=True)
class Explain:
    """Where the memory of a step goes, module by module, and what would save it."""

    factory: Factory
    """A function without arguments that returns (step, arguments): a loss or a training step, and a tuple."""
    argnums: tuple[int, ...] = (0,)
    """For a loss: which arguments to differentiate with respect to."""
    picture: File = None
    """Draw the memory over the step into this file."""
    json: bool = False
    """Print JSON, which `memjax.Explanation.from_json` reads."""

    def run(self, console: Console) -> int:
        _check_files(picture=self.picture)
        step, args = _made(self.factory)
        explained = step.explain if isinstance(step, Jitted) else functools.partial(explain, step)
        found = explained(*args, argnums=self.argnums)
        if self.picture is not None:
            _written(self.picture, found.plot)
        if self.json:
            print(found.to_json())
        else:
            console.print(found) if console.is_terminal else print(found)
        return 0


@dataclasses.dataclass(frozen=True)
class Fit:
    """The plan by which a training step fits a budget of bytes, and what other budgets would cost.

    It compiles and runs nothing. The exit status is 1 where nothing fits.
    """

    factory: Factory
    """A function without arguments that returns (step, arguments). The step may be under `memjax.jit`, with its options."""
    budget: str = "device"
    """Bytes of a device, as "40GiB"; "device": what is free of it; "min": the least."""
    allow: tuple[str, ...] = ()
    """What a plan may do, as for `memjax.jit`: recompute, tile, microbatch, offload, compress."""
    donate_argnums: tuple[int, ...] = ()
    """Arguments whose memory results may take."""
    plan: File = None
    """Write the plan into this file, for `memjax.StepPlan.from_json`."""
    picture: File = None
    """Draw bytes and predicted time of all plans into this file."""
    json: bool = False
    """Print JSON."""

    def run(self, console: Console) -> int:
        _check_files(picture=self.picture, plan=self.plan)
        step, args = _made(self.factory)
        step, line = _within(step, args, self)
        refused = None
        try:
            plan = step.plan(*args)
        except BudgetError as error:
            refused, plan = str(error), error.least
        points = step.frontier(*args)
        if self.picture is not None:
            _written(self.picture, lambda path: _plot(points, plan, refused is None, path))
        if self.plan is not None and refused is None:
            _written(self.plan, lambda path: path.write_text(plan.to_json()))
        if self.json:
            print(json.dumps(_as_data(plan, points, refused)))
        else:
            said = [refused] if refused is not None else [str(plan), f"In your program: {line}"]
            _show(console, said, _frontier_table(points))
        return int(refused is not None)


def run(argv: Sequence[str]) -> int:
    """Runs a command, and returns the exit status: 0, or 1 where nothing fits, or 2 after saying what is wrong with it."""
    description = "What memjax says of a training step: where its memory goes, and how it fits."
    config = (tyro.conf.FlagCreatePairsOff,)
    command = tyro.cli(Explain | Fit, prog="python -m memjax", description=description, args=list(argv), config=config)
    try:
        return command.run(Console())
    except (TypeError, ValueError) as error:
        if not (isinstance(error, CommandError) or is_own(error)):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _made(target: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The step and its arguments, by the factory of this name."""
    module, _, name = target.partition(":")
    if not name or module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
        fix = "name the module, not its file, and the function, such as train:make_step"
        raise CommandError(f"FACTORY must be PACKAGE.MODULE:FACTORY, got {target!r}: {fix}")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            fix = "run the command in the folder that has it, or install it"
            raise CommandError(f"FACTORY must be in a module that is there, got {module!r}: {fix}") from error
        raise CommandError(f"{module} imports {error.name!r}, which is not there: install it") from error
    if not hasattr(found, name):
        near = difflib.get_close_matches(name, vars(found), 1)
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", None) == module]
        fix = f"did you mean {near[0]!r}?" if near else f"it defines {', '.join(own) or 'nothing'}"
        raise CommandError(f"FACTORY must be a function in {module}, got {name!r}: {fix}")
    factory = check.function("FACTORY", getattr(found, name), f"it returns {_WANTED}", arguments=0)
    made = factory()
    if not (
        isinstance(made, tuple | list) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)
    ):
        raise CommandError(f"FACTORY must return {_WANTED}; {target} returned {check.shown(made)}")
    return made[0], made[1]


def _within(step: Callable[..., Any], args: Sequence[Any], asked: Fit) -> tuple[Jitted, str]:
    """The step under `memjax.jit` with what is asked, and how to write that. Options that it is jitted with already stay."""
    asked_for: dict[str, Any] = {"donate_argnums": asked.donate_argnums, "allow": asked.allow}
    options = {name: value for name, value in asked_for.items() if value}
    if isinstance(step, jax.stages.Wrapped) and "donate_argnums" not in options:  # by jax.jit, or nnx.jit
        traced = step.trace(*args)
        infos = getattr(traced, "traced", traced).args_info[0]
        donated = [i for i, info in enumerate(infos) if any(leaf.donated for leaf in jax.tree.leaves(info))]
        options |= {"donate_argnums": tuple(donated)} if donated else {}
    budget: dict[str, Any] = {"budget": asked.budget}
    found = step.asking(**options, **budget) if isinstance(step, Jitted) else jit(step, **options, **budget)
    how = {name: repr(value) for name, value in (options if asked.plan is not None else options | budget).items()}
    if asked.plan is not None:
        how["plan"] = f"memjax.StepPlan.from_json(open({str(asked.plan)!r}).read())"
    name = getattr(step, "__name__", "train_step")
    return found, ", ".join([f"step = memjax.jit({name}", *(f"{key}={value}" for key, value in how.items())]) + ")"


def _frontier_table(points: Sequence[StepPoint]) -> list[Table]:
    """What some budgets get, from the least bytes to the most."""
    if not points:
        return []
    ratio = (points[-1].nbytes / points[0].nbytes) ** (1 / (_ROWS - 1))
    levels = [points[0].nbytes * ratio**i for i in range(_ROWS - 1)]
    chosen = [[point for point in points if point.nbytes <= level][-1] for level in levels]
    times = {point: f"{point.seconds / points[-1].seconds:.2f}" for point in (*chosen, points[-1])}
    # Of equal times the least bytes.
    shown = [*{times[point]: point for point in reversed(chosen)}.values()][::-1]
    shown += [points[-1]] if shown[-1] != points[-1] else []
    cells = [[readable_bytes(point.nbytes), times[point], str(point.microbatches)] for point in shown]
    return [("What each budget is predicted to cost", ["bytes", "time", "microbatches"], cells)]


def _as_data(plan: StepPlan, points: Sequence[StepPoint], refused: str | None) -> dict[str, Any]:
    return {
        "fits": refused is None,
        "account": refused,
        "budget": plan.budget,
        "nbytes": plan.nbytes,
        "plain_nbytes": plan.plain_nbytes,
        "frontier": [point._asdict() for point in points],
        "plan": dataclasses.asdict(plan),
    }


def _plot(points: Sequence[StepPoint], plan: StepPlan, fits: bool, path: Any) -> None:
    """Draws the frontier, and what the plan holds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit, name = (2**30, "GiB") if plan.plain_nbytes >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if points:
        sizes, times = zip(
            *((point.nbytes / unit, point.seconds / points[-1].seconds) for point in points), strict=True
        )
        axes.step(sizes, times, where="post", label="fastest plan, predicted")
    for nbytes, colour, label in (
        (plan.nbytes, "black", "this plan, compiled" if fits else "the least, compiled"),
        (plan.plain_nbytes, "0.6", "as it is written"),
    ):
        axes.axvline(nbytes / unit, color=colour, linestyle=":", label=label)
    axes.set_xlabel(f"memory of a device, {name}")
    axes.set_ylabel("predicted time of the derivatives")
    axes.legend()
    figure.savefig(path, dpi=150)


def _show(console: Console, said: Sequence[str], tables: Sequence[Table]) -> None:
    if console.is_terminal:
        console.print(*map(Text, said), as_rich(tables), sep="\n\n")
    else:
        print(*said, as_text(tables), sep="\n\n")


def _check_files(**paths: pathlib.Path | None) -> None:
    """That files can be written, before anything is compiled."""
    for name, path in paths.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(
                f"--{name} must be in a folder that is there, got {str(path)!r}: make {path.parent} first"
            )
    if paths["picture"] is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--picture needs matplotlib: pip install 'memjax[explain]'")


def _written(path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
    try:
        write(path)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise CommandError(f"{path} cannot be written: {error}") from error
