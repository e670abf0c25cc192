"""Tables in Markdown from `benchmarks/results/`, with machine, versions and command in a footnote."""

import json
from collections.abc import Callable
from typing import Any

from benchmarks.record import RESULTS

Tables = dict[str, Callable[[], str]]


def load(name: str, failed: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The environment and the rows of a file of results, without those that failed unless `failed` is set."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    return data["environment"], [row for row in data["rows"] if failed or "error" not in row]


def table(header: list[str], rows: list[list[str]], sources: list[dict[str, Any]], note: str) -> str:
    """A table with a footnote `note` that says where its numbers are from."""
    where = " ".join(dict.fromkeys(source(environment) for environment in sources))
    return f"{bare_table([f'{header[0]}[^{note}]', *header[1:]], rows)}\n\n[^{note}]: {where}"


def bare_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(environment: dict[str, Any]) -> str:
    """Machine, versions, date and command."""
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items() if name != "jaxlib")
    return f"{machine(environment)}; {versions}; {environment['date']}; `{environment['command']}`."


def machine(environment: dict[str, Any]) -> str:
    accelerator = environment["accelerator"]
    if accelerator is None:
        return f"{environment['cpu_cores']} CPU cores"
    names = accelerator.split(", ")
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"


def gib(count: float | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f}"
