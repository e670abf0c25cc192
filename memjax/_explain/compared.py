"""Compares a predicted peak with the compiled one: which arrays are live at both, and which at only one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from memjax._core.check import readable_bytes
from memjax._explain.explanation import Table, as_rich, as_text, signed
from memjax._explain.kept import collapsed, template
from memjax._explain.parts import Alive, ComparedRow

_ROWS = 20


@dataclasses.dataclass(frozen=True, repr=False)
class PeakComparison:
    """The arrays that a plan predicts to be alive at its peak, beside those that are alive at the peak of the compiled program.

    `print` gives a table. Each array is named by what makes it, and where in your code, as in plans. A buffer of the program
    is the predicted array of the same name and type, or else of the same place and type, or bytes, or of the same type where one
    of the two places is not known.

    Attributes:
      rows: the largest first.
      predicted: the predicted bytes of all rows.
      compiled: the compiled bytes of all rows, which is the compiler's own figure. One row accounts for the difference between
        this and the buffers that were found live, such as gaps between buffers.
    """

    rows: tuple[ComparedRow, ...]
    predicted: int
    compiled: int

    @property
    def predicted_alone(self) -> int:
        """Bytes of the rows that are predicted but absent from the compiled program."""
        return sum(row.predicted for row in self.rows if not row.counts[1])

    @property
    def compiled_alone(self) -> int:
        """Bytes of the rows that are in the compiled program but not predicted."""
        return sum(row.compiled for row in self.rows if not row.counts[0])

    def __repr__(self) -> str:
        bytes_of = f"{readable_bytes(self.predicted)} predicted, {readable_bytes(self.compiled)} compiled"
        return f"PeakComparison({bytes_of}, in {len(self.rows)} rows)"

    def __str__(self) -> str:
        return as_text([_table(self)])

    def __rich__(self) -> Any:
        return as_rich([_table(self)])


def compared(predicted: Sequence[Alive], compiled: Sequence[Alive]) -> PeakComparison:
    """Compares the arrays that are live at the two peaks."""
    pairs, left, right = _paired(predicted, compiled)
    sides = [*pairs, *((one, None) for one in left), *((None, one) for one in right)]
    alike: dict[tuple[str, ...], list[tuple[Alive, Alive | None, Alive | None]]] = {}
    for one, other in sides:
        named = one or other
        assert named is not None
        head, line = _parted(named.name)
        alike.setdefault((template(head), line, named.type), []).append((named, one, other))
    rows = [_row(members) for members in alike.values()]
    ordered = sorted(rows, key=lambda row: -max(row.predicted, row.compiled))
    return PeakComparison(tuple(ordered), sum(one.bytes for one in predicted), sum(one.bytes for one in compiled))


def _row(members: Sequence[tuple[Alive, Alive | None, Alive | None]]) -> ComparedRow:
    """Merges arrays of one type and line into a row; their modules differ only in numbers."""
    parts = [_parted(named.name) for named, _, _ in members]
    name = collapsed([head for head, _ in parts]) + (f", {parts[0][1]}" if parts[0][1] else "")
    predicted = [one.bytes for _, one, _ in members if one is not None]
    compiled = [other.bytes for _, _, other in members if other is not None]
    counts = len(predicted), len(compiled)
    return ComparedRow(name, members[0][0].type, sum(predicted), sum(compiled), counts)


def _parted(name: str) -> tuple[str, str]:
    """Splits a name at its last comma: "mul Model/mlp, model.py:12" gives ("mul Model/mlp", "model.py:12").

    A name without a comma gives (name, "").
    """
    head, _, line = name.rpartition(", ")
    return (head, line) if head else (name, "")


def _paired(
    predicted: Sequence[Alive], compiled: Sequence[Alive]
) -> tuple[list[tuple[Alive | None, Alive | None]], list[Alive], list[Alive]]:
    """Pairs predicted with compiled arrays; returns the pairs, and the unpaired arrays of each side."""
    found: list[tuple[Alive | None, Alive | None]] = []
    left, right = list(predicted), list(compiled)
    for key, key_of_compiled in _ALIKE:
        there: dict[Any, list[Alive]] = {}
        for one in right:
            there.setdefault(key_of_compiled(one), []).append(one)
        rest = []
        for one in left:
            same = there.get(key(one)) if key(one) is not None else None
            if same:
                found.append((one, same.pop(0)))
            else:
                rest.append(one)
        left, right = rest, [*itertools.chain.from_iterable(there.values())]
    return found, left, right


_Key = Callable[[Alive], Any]
_TYPE: _Key = lambda one: one.type or None
_PLACE: _Key = lambda one: (one.place, one.type) if one.place else None
_BYTES: _Key = lambda one: (one.place, one.bytes) if one.place else None
_UNPLACED: _Key = lambda one: None if one.place else one.type or None
_ALIKE: tuple[tuple[_Key, _Key], ...] = (
    (lambda one: (one.name, one.type), lambda one: (one.name, one.type)),
    (_PLACE, _PLACE),
    (_BYTES, _BYTES),
    (_UNPLACED, _TYPE),
    (_TYPE, _UNPLACED),
)
"""What is equal for a predicted array and a buffer that are taken to be one, and for the buffer; the surest first."""


def _table(comparison: PeakComparison) -> Table:
    shown, rest = comparison.rows[:_ROWS], comparison.rows[_ROWS:]
    cells = [[*_sizes(row.predicted, row.compiled), _array(row), row.name] for row in shown]
    if rest:
        of_rest = sum(row.predicted for row in rest), sum(row.compiled for row in rest)
        cells.append([*_sizes(*of_rest), "", f"{len(rest)} more rows"])
    cells.append([*_sizes(comparison.predicted, comparison.compiled), "", "all"])
    alone = _sizes(comparison.predicted_alone, comparison.compiled_alone)
    cells.append([*alone[:2], "", "", "of that on one side alone"])
    return "Alive at the peak", ["predicted", "compiled", "difference", "arrays", "made by"], cells


def _sizes(predicted: int, compiled: int) -> list[str]:
    more = compiled - predicted
    plus = "+" if more > 0 else ""
    return [*(signed(size) if size else "" for size in (predicted, compiled)), f"{plus}{signed(more)}" if more else ""]


def _array(row: ComparedRow) -> str:
    one, other = row.counts
    count = f" x{one}" if one == other else f" x{one} and x{other}"
    return row.type + (count if row.type and (one, other) != (1, 1) else "")
