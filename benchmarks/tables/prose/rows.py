"""What sentences take from `benchmarks/results/`."""

from collections.abc import Iterable
from typing import Any

from benchmarks.tables.markdown import load

Row = dict[str, Any]

H200_BANDWIDTH = 4.8e12  # bytes a second between an H200 and its memory, by its data sheet


def by(name: str, key: str) -> dict[str, Row]:
    """The rows of a file of results that have `key`, by it."""
    return {row[key]: row for row in load(name)[1] if key in row}


def percent(share: float, digits: int = 0) -> str:
    return f"{share:.{digits}%}"


def span(values: Iterable[float], digits: int = 0) -> str:
    """Shares as "2% to 5%"."""
    low, *_, high = sorted(values)
    return f"{percent(low, digits)} to {percent(high, digits)}"
