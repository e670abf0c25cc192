"""Time and memory of one gradient of an LSTM and a GRU by each strategy of `remat.scan`, and by its default.

    python -m benchmarks.bptt_strategies            # 1,000 steps, width 256, batch 64, float32: a GPU, about a minute
    python -m benchmarks.bptt_strategies --length 50 --hidden 16 --batch 4 --slots 5 20 --rounds 1 --name scratch

Writes `results/NAME.json`, a row for each case as soon as it is timed. Times are medians. "internal" gets as many internal
states as fit into the slots, so that all hold the same memory. Rows that are the default, `strategy=None`, say so.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax import lax
from rich.console import Console

from benchmarks import record
from benchmarks.bptt import Case, cell
from memjax import remat
from memjax._plan.schedule.choose import exact
from memjax._plan.schedule.store import Shared
from memjax.remat._scan.step import StepBackward, trace_step
from memjax.remat._scan.ways import Ways


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run."""

    length: int = 1000
    batch: int = 64
    hidden: int = 256
    rounds: int = 5
    slots: tuple[int, ...] = (30, 10, 50)
    name: str = "bptt_strategies"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A recurrent cell: its step, how many gates its matrices have, how many states its carry."""

    step: Callable[[Any, Any, Any], tuple[Any, None]]
    gates: int
    states: int

    def params(self, hidden: int) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 2)
        wi, wh = (jax.random.normal(key, (hidden, self.gates * hidden)) * 0.05 for key in keys)
        return {"wi": wi, "wh": wh, "b": jnp.zeros(self.gates * hidden)}

    def start(self, batch: int, hidden: int) -> Any:
        zeros = jnp.zeros((batch, hidden))
        return (zeros,) * self.states if self.states > 1 else zeros


def gru(params: dict[str, Any], h: Any, x: Any) -> tuple[Any, None]:
    """One step of a GRU: x of shape (batch, inputs), a carry of (batch, hidden)."""
    r, z, n = jnp.split(x @ params["wi"] + params["b"], 3, -1)
    hr, hz, hn = jnp.split(h @ params["wh"], 3, -1)
    z = jax.nn.sigmoid(z + hz)
    return (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h, None


CELLS = {"lstm": Cell(cell, 4, 2), "gru": Cell(gru, 3, 1)}


def loss_with(kind: Cell, scan: Callable[..., Any], params: Any, xs: Any) -> Any:
    """Run the cell with `scan(f, init, xs)` and return a scalar."""
    carry, _ = scan(functools.partial(kind.step, params), kind.start(xs.shape[1], params["wh"].shape[0]), xs)
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(carry))


def ways(options: Options, kind: Cell, params: Any, xs: Any) -> Iterator[tuple[dict[str, Any], Callable[..., Any]]]:
    """(what the row says, scan); the most telling first."""
    yield {"strategy": "jax.lax.scan"}, lax.scan
    start = kind.start(options.batch, options.hidden)
    step, _ = trace_step(functools.partial(kind.step, params), start, xs)
    backward = StepBackward(step, [True] * len(step.consts), [False])
    size = 1 + Shared(step.carry, backward.kept, 1, 1).rows_of_kept
    for slots in options.slots:
        plan = exact(backward.steps(options.length), slots, None, Ways(backward, None).costs)
        assert plan.schedule is not None
        default = plan.schedule.strategy
        for strategy in ("hidden", "mixed", "internal"):
            held = slots // size if strategy == "internal" else slots
            if held:
                row = {"strategy": strategy, "slots": slots, "default": strategy == default}
                yield row, functools.partial(remat.scan, slots=held, strategy=strategy)


def main(options: Options) -> None:
    console = Console(width=150)
    xs = jax.random.normal(jax.random.key(2), (options.length, options.batch, options.hidden))
    rows: list[dict[str, Any]] = []
    for name, kind in CELLS.items():
        params = kind.params(options.hidden)
        plain: Case | None = None
        for about, scan in ways(options, kind, params, xs):
            row = {"cell": name, "length": options.length, **about}
            case = Case(row, functools.partial(loss_with, kind, scan), params, xs)
            gradient = case.run()
            case.times.clear()
            for _ in range(options.rounds):
                case.run()
            case.row["ms"] = statistics.median(case.times) * 1e3
            if plain is None:
                plain, reference = case, gradient
            case.row["ratio"] = case.row["ms"] / plain.row["ms"]
            off = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), gradient, reference)
            case.row["off"] = max(off.values())
            console.print(case.row)
            rows.append(case.row)
            record.save(options.name, rows)  # after each, so that nothing is lost


if __name__ == "__main__":
    main(tyro.cli(Options))
