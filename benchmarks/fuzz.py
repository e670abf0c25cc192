"""Random programs within budgets, on a CPU: `python -m benchmarks.fuzz`, hours on two cores.

A seed makes a program of loops, branches, gathers, scatters, products, reductions and rules of derivatives in each other, in
float64. Its gradients under `memjax.planned`, and a training step of it under `memjax.jit`, are compared with plain JAX: results
to 1e-10, or to 20 times what moving the arguments by one unit in the last place changes, if that is more; compiled bytes with the
budget. Where a budget is refused, the least that the message names is the next budget, which has to be kept.

    python -m benchmarks.fuzz --seeds 17 18     # these alone, nothing is saved
"""

import collections
import dataclasses
import json
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.jit_public import FLAGS

OUTCOMES = ("kept", "refused", "untrue least", "over the budget", "wrong", "crashed")
GOOD = ("kept", "refused")
ROUNDING = 1e-11  # what moving arguments by one unit changes, in programs without float32


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    seeds: tuple[int, ...] = ()
    """Which programs; none: the first `count`."""
    count: int = 300
    """How many programs."""
    first: int = 0
    """The first of them. Rows of others stay as they are."""
    shares: tuple[float, ...] = (0.8, 0.55, 0.35)
    """Budgets, as shares of the temporary bytes of the program as it is written."""
    ways: tuple[str, ...] = ("planned", "jit")
    """What is checked."""
    jobs: int = 2
    """How many programs are checked at once."""
    timeout: float = 600
    """Seconds for one program."""


def compact(result: dict[str, Any]) -> dict[str, Any]:
    """What is saved of a seed: all of what is wrong, and of the rest its outcomes and the worst error."""
    rows = result.get("rows") or [{"way": "all", "outcome": "crashed", "why": result.get("error", "no message")}]
    outcomes: dict[str, list[str]] = {}
    for row in rows:
        outcomes.setdefault(row["way"], []).append(row["outcome"])
    bad = [row for row in rows if row["outcome"] not in GOOD]
    exact = all(row.get("rounding", 1.0) < ROUNDING for row in rows)
    error = max((row["error"] for row in rows if "error" in row), default=None)
    about = {"seed": result["seed"], "parts": " ".join(result.get("parts", ())), "step": result.get("step")}
    return about | {"outcomes": outcomes, "error": error, "is_float64_alone": exact, "bad": bad}


def counts(found: list[dict[str, Any]]) -> dict[str, Any]:
    """How many budgets of which outcome, and the worst error of programs in float64 alone."""
    every = collections.Counter(
        (way, outcome) for one in found for way, outcomes in one["outcomes"].items() for outcome in outcomes
    )
    ways = dict.fromkeys(way for way, _ in every)
    errors = [one["error"] for one in found if one["is_float64_alone"] and one["error"] is not None]
    by_way = {way: {outcome: every[way, outcome] for outcome in OUTCOMES} for way in ways}
    return {"programs": len(found), "budgets": by_way, "worst_error": max(errors, default=None)}


def show(found: list[dict[str, Any]]) -> None:
    bad = Table("seed", "way", "share", "outcome", "why")
    for one in found:
        for row in one["bad"]:
            figures = (
                f"{k} {row[k]}" for k in ("budget", "refused", "compiled", "then", "error", "rounding") if k in row
            )
            why = row.get("why") or ", ".join(figures)
            bad.add_row(str(one["seed"]), row["way"], str(row.get("share", "")), row["outcome"], why[:160])
    console = Console(width=None if Console().is_terminal else 200)
    if bad.rows:
        console.print(bad)
    summary = counts(found)
    table = Table("way", *OUTCOMES)
    for way, outcomes in summary["budgets"].items():
        table.add_row(way, *map(str, outcomes.values()))
    console.print(table)
    console.print(
        f"{summary['programs']} programs; in float64 alone the worst error is {summary['worst_error'] or 0:.1e}"
    )


def main(config: Config) -> None:
    path = record.RESULTS / "fuzz.json"
    before = json.loads(path.read_text())["rows"][1:] if path.exists() and not config.seeds else []
    every = {row["seed"]: row for row in before}
    seeds = config.seeds or range(config.first, config.first + config.count)
    cases = [{"seed": seed, "shares": config.shares, "ways": config.ways} for seed in seeds]
    environ = {"XLA_FLAGS": " ".join(FLAGS), "JAX_PLATFORMS": "cpu"}
    module, found = "benchmarks.cases.fuzz.measure", dict[int, dict[str, Any]]()
    for case, result in record.in_fresh_processes(module, cases, environ, config.timeout, config.jobs):
        found[case["seed"]] = one = compact(result)
        print(json.dumps(one), flush=True)
        if not config.seeds:
            every[case["seed"]] = one
            rows = [every[seed] for seed in sorted(every)]
            record.save("fuzz", [counts(rows), *rows])
    show([found[seed] for seed in sorted(found)])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
