"""The commands of `python -m memjax`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.text import Text

from memjax._commands.batch import batch_of, budget_for, largest
from memjax._commands.devices import Gpus, described, placed
from memjax._commands.factory import CommandError, made, tell, users_errors
from memjax._commands.frontier import as_data, plot, table
from memjax._core.arguments import is_array_or_number, is_nnx, options_of
from memjax._explain.explain import explain
from memjax._explain.explanation import Explanation, Table, as_rich, as_text
from memjax._explain.line import line
from memjax._jit.account import BudgetError
from memjax._jit.jit import Jitted, jit

Factory = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PACKAGE.MODULE:FACTORY")]
Devices = Annotated[str | None, tyro.conf.arg(metavar="NUMBERxGPU")]
File = Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE")]


@dataclasses.dataclass(frozen=True)
class Explain:
    """Where the memory of a step goes, module by module, and what would save it."""

    factory: Factory
    """A function without arguments that returns (step, arguments): a loss or a training step, and a tuple."""
    argnums: tuple[int, ...] = (0,)
    """For a loss: which arguments to differentiate with respect to."""
    static_argnums: tuple[int, ...] = ()
    """Arguments that the step needs as values of Python."""
    picture: File = None
    """Draw the memory over the step into this file."""
    trace: File = None
    """Write the memory over the step into this file, a trace that Perfetto opens."""
    devices: Devices = None
    """GPUs to compile for, which need not be there, such as 1xH100."""
    json: bool = False
    """Print JSON, which `memjax.Explanation.from_json` reads."""

    def run(self, console: Console) -> int:
        _check_files(picture=self.picture, trace=self.trace)
        step, args, _ = _made(self.factory, self.devices)
        with users_errors(f"{self.factory} must return a step that runs; it"):
            found = self._explained(step, args)
        if self.picture is not None:
            _written("picture", self.picture, found.plot)
        if self.trace is not None:
            _written("trace", self.trace, found.trace)
        if self.json:
            print(found.to_json())
        else:
            console.print(found) if console.is_terminal else print(found)
        return 0

    def _explained(self, step: Callable[..., Any], args: Sequence[Any]) -> Explanation:
        """As a step under `memjax.jit`, which knows more of it, unless some arguments are none of `jax.jit`."""
        options = options_of(step) | ({"static_argnums": self.static_argnums} if self.static_argnums else {})
        leaves = jax.tree.leaves(args, is_leaf=is_nnx)
        if isinstance(step, Jitted):
            step = step.asking(**options)
        elif options or all(is_nnx(leaf) or is_array_or_number(leaf) for leaf in leaves):
            step = jit(step, **options)
        return (step.explain if isinstance(step, Jitted) else functools.partial(explain, step))(
            *args, argnums=self.argnums
        )


@dataclasses.dataclass(frozen=True)
class Fit:
    """The plan by which a training step fits a budget of bytes, and what other budgets would cost.

    It compiles and runs nothing. The exit status is 1 where nothing fits.
    """

    factory: Factory
    """A function without arguments that returns (step, arguments). The step may be under `memjax.jit`, with its options."""
    budget: str = "device"
    """Bytes of a device, as "40GiB"; "50%": half of what the step holds as it is; "device": what is free; "min": the least."""
    allow: tuple[str, ...] = ()
    """What a plan may do, as for `memjax.jit`: recompute, tile, microbatch, offload, compress, two_passes."""
    donate_argnums: tuple[int, ...] = ()
    """Arguments whose memory results may take."""
    static_argnums: tuple[int, ...] = ()
    """Arguments that the step needs as values of Python. Those of a jitted step are known."""
    batch_argnums: tuple[int, ...] = ()
    """Arguments whose first axis is the batch: says how many examples are predicted to fit."""
    plan: File = None
    """Write the plan into this file, for `memjax.StepPlan.from_json`."""
    picture: File = None
    """Draw bytes and predicted time of all plans into this file."""
    devices: Devices = None
    """GPUs to plan for, which need not be there, such as 1xH100 or 8xH200. For several the factory takes `devices`."""
    json: bool = False
    """Print JSON."""

    def run(self, console: Console) -> int:
        _check_files(picture=self.picture, plan=self.plan)
        given, args, gpus = _made(self.factory, self.devices)
        step, to_paste = _within(given, self, gpus)
        to_fill = budget_for(self.budget, gpus) if self.batch_argnums else 0
        examples = batch_of(args, self.batch_argnums) if self.batch_argnums else None
        refused = None
        with users_errors(f"{self.factory} must return a step that runs; it", but=(BudgetError,)):
            try:
                plan = step.plan(*args)
            except BudgetError as error:
                refused, plan = str(error), error.least
            points = step.frontier(*args)
        batch = largest(step, args, self.batch_argnums, examples, to_fill) if examples is not None else None
        if self.picture is not None:
            _written("picture", self.picture, lambda path: plot(points, plan, refused is None, path))
        if self.plan is not None and refused is None:
            _written("plan", self.plan, lambda path: path.write_text(plan.to_json()))
        if self.json:
            print(json.dumps(as_data(plan, points, refused, gpus, batch)))
        else:
            said = [refused] if refused is not None else [str(plan), f"In your program: {to_paste}"]
            if isinstance(given, Jitted) and "plan" in given.options:
                said.append(
                    "note: the step has a plan under memjax.jit(plan=), which is left aside: this one is made anew"
                )
            said += [str(batch)] if batch is not None else []
            said += [f"note: {gpus}"] if gpus is not None else []
            _show(console, said, table(points))
        return int(refused is not None)


def run(argv: Sequence[str]) -> int:
    """Runs a command, and returns the exit status: 0, or 1 where nothing fits, or 2 after saying what is wrong with it."""
    description = "What memjax says of a training step: where its memory goes, and how it fits."
    config = (tyro.conf.FlagCreatePairsOff,)
    command = tyro.cli(Explain | Fit, prog="python -m memjax", description=description, args=list(argv), config=config)
    try:
        return command.run(Console())
    except BrokenPipeError:
        raise
    except Exception as error:
        tell(error)
        return 2


def _made(factory: str, devices: str | None) -> tuple[Callable[..., Any], Sequence[Any], Gpus | None]:
    """The step, its arguments, and the GPUs that are asked for."""
    if devices is None:
        return *made(factory), None
    gpus = described(devices)
    step, args = made(factory, gpus.devices)
    return step, placed(args, gpus), gpus


def _within(step: Callable[..., Any], asked: Fit, gpus: Gpus | None) -> tuple[Jitted, str]:
    """The step under `memjax.jit` with what is asked, and how to write that. Options that it is jitted with already stay."""
    asked_for = {name: getattr(asked, name) for name in ("donate_argnums", "static_argnums", "allow")}
    given = step.options if isinstance(step, Jitted) else options_of(step)
    options = given | {name: value for name, value in asked_for.items() if value} | {"budget": asked.budget}
    options.pop("plan", None)
    budget = gpus.nbytes if gpus is not None and asked.budget == "device" else asked.budget
    within = options | {"budget": budget}
    found = step.asking(**within, plan=None) if isinstance(step, Jitted) else jit(step, **within)
    if asked.plan is None:
        return found, line(step, options)
    code = {"plan": f"memjax.StepPlan.from_json(open({str(asked.plan)!r}).read())"}
    return found, line(step, {name: value for name, value in options.items() if name != "budget"}, code)


def _show(console: Console, said: Sequence[str], tables: Sequence[Table]) -> None:
    if console.is_terminal:
        console.print(*map(Text, said), as_rich(tables), sep="\n\n")
    else:
        print(*said, as_text(tables), sep="\n\n")


def _check_files(**paths: pathlib.Path | None) -> None:
    """That files can be written, before anything is compiled."""
    for name, path in paths.items():
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            raise CommandError(f"--{name} must be in a folder that is there, got {str(path)!r}: make {folder} first")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise CommandError(f"--{name} must be a file that can be written, got {str(path)!r}: name another")
    picture = paths["picture"]
    if picture is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--picture needs matplotlib: pip install 'memjax[explain]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if picture.suffix[1:].lower() not in FigureCanvasAgg.get_supported_filetypes():
        raise CommandError(f"--picture must end in .png, .pdf or .svg, for example, got {str(picture)!r}")


def _written(name: str, path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
    try:
        write(path)
    except OSError as error:
        raise CommandError(f"--{name} cannot be written: {error}") from error
