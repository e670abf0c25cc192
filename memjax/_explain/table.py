"""An explanation as text, and as tables of rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memjax._core.check import readable_bytes
from memjax._explain.parts import Remedy, Row

_ROWS = 12
_REMEDIES = 6


def as_text(explanation: Any) -> str:
    """Tables in columns of plain text."""
    parts = []
    for title, heads, cells in _tables(explanation):
        widths = [max(len(row[column]) for row in (heads, *cells)) for column in range(len(heads))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (heads, *cells)
        ]
        parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
    return "\n\n".join([*parts, *_messages(explanation)])


def as_rich(explanation: Any) -> Any:
    """The same for `rich.print`, which is only imported here."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown: list[Any] = []
    for title, heads, cells in _tables(explanation):
        table = Table(title=Text(title), title_justify="left", pad_edge=False)
        for head in heads:
            table.add_column(head, justify="right" if head in ("bytes", "share", "count") else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))  # brackets are no markup
        shown.append(table)
    return Group(*shown, *map(Text, _messages(explanation)))


def _tables(explanation: Any) -> list[tuple[str, list[str], list[list[str]]]]:
    tables = [_kept("Kept between the passes", explanation.rows, explanation.residual_bytes)]
    if explanation.offloaded:
        tables.append(_kept("Offloaded to the host", explanation.offloaded, explanation.offloaded_bytes))
    if chosen := _remedies(explanation.rows):
        cells = [[readable_bytes(one.saves), f"{one.milliseconds:.2g}", _kind(one), one.how] for one in chosen]
        tables.append(("What would save it", ["bytes", "ms", "kind", "how"], cells))
    peak = explanation.peak
    if peak is not None:
        title = f"Alive at the peak of the compiled program: {readable_bytes(peak.bytes)}"
        title += f" (the compiler reserves {readable_bytes(peak.temp_bytes)})"
        cells = [
            [readable_bytes(row.bytes), f"{row.bytes / max(peak.bytes, 1):.0%}", row.path, row.kind, str(row.count)]
            for row in peak.rows[:_ROWS]
        ]
        if len(peak.rows) > _ROWS:
            rest = sum(row.bytes for row in peak.rows[_ROWS:])
            cells.append(
                [readable_bytes(rest), f"{rest / peak.bytes:.0%}", f"{len(peak.rows) - _ROWS} more rows", "", ""]
            )
        tables.append((title, ["bytes", "share", "module", "kind", "count"], cells))
        steps = [
            [f"+{readable_bytes(count)}" if index and count > 0 else _signed(count), what]
            for index, (what, count) in enumerate(peak.difference)
        ]
        steps.append([readable_bytes(peak.bytes), "the peak"])
        tables.append(("From what is kept to the peak", ["bytes", "what"], steps))
    return tables


def _kept(what: str, rows: Sequence[Row], whole: int) -> tuple[str, list[str], list[list[str]]]:
    cells = [_cells(row) for row in rows[:_ROWS]]
    if len(rows) > _ROWS:
        rest = sum(row.bytes for row in rows[_ROWS:])
        cells.append([readable_bytes(rest), f"{rest / whole:.0%}", f"{len(rows) - _ROWS} more rows", *[""] * 5])
    heads = ["bytes", "share", "module", "arrays", "made by", "read by", "line", "first remedy"]
    if any(row.why for row in rows):
        heads.append("why")
        reasons = [row.why for row in rows[:_ROWS]]
        cells = [[*line, reason] for line, reason in zip(cells, [*reasons, ""], strict=False)]
    return f"{what}: {readable_bytes(whole)}", heads, cells


def _remedies(rows: Sequence[Row]) -> list[Remedy]:
    """The first remedy of each of the largest rows, those that save most first."""
    first = dict.fromkeys(row.remedies[0] for row in rows[:_ROWS] if row.remedies)
    return sorted(first, key=lambda remedy: -remedy.saves)[:_REMEDIES]


def _signed(count: int) -> str:
    return f"-{readable_bytes(-count)}" if count < 0 else readable_bytes(count)


def _cells(row: Row) -> list[str]:
    arrays = f"{row.dtype}[{','.join(map(str, row.shape))}]" + (f" x{row.count}" if row.count > 1 else "")
    near = [
        f"{name} in {where.rpartition('/')[2]}" if where else name
        for name, _, where in (reader.partition(" in ") for reader in row.readers)
    ]
    readers = ", ".join(near[:2]) + (f" and {len(row.readers) - 2} more" if len(row.readers) > 2 else "")
    remedy = f"{row.remedies[0].kind}, {readable_bytes(row.remedies[0].saves)}" if row.remedies else ""
    return [readable_bytes(row.bytes), f"{row.share:.0%}", row.path, arrays, row.producer, readers, row.source, remedy]


def _kind(remedy: Remedy) -> str:
    return remedy.kind if remedy.is_exact else f"{remedy.kind} (not exact)"


def _messages(explanation: Any) -> list[str]:
    dropped = [f"not kept: {text}" for text in explanation.dropped[:_ROWS]]
    if len(explanation.dropped) > _ROWS:
        dropped.append(f"not kept: {len(explanation.dropped) - _ROWS} more")
    warnings = [f"warning: {text}" for text in explanation.warnings]
    return [*dropped, *warnings, *(f"note: {text}" for text in explanation.notes)]
