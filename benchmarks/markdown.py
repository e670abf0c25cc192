"""Results as tables of Markdown: what every module of tables reads and writes with."""

import json

from benchmarks.record import RESULTS


def load(name: str) -> tuple[dict, list[dict]] | None:
    """Environment and rows of a file of results, without the rows that failed; None if there is no such file."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    return data["environment"], [row for row in data["rows"] if "error" not in row]


def source(environment: dict) -> str:
    """The line below a table: machine, versions, date and command."""
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items() if name != "jaxlib")
    machine = environment["accelerator"] or f"{environment['cpu_cores']} CPU cores"
    return f"{machine}; {versions}; {environment['date']}; `{environment['command']}`."


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f}"
