"""What `memjax.explain` returns: plain data, printed as a table, drawn, and written as JSON."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from memjax._core import check
from memjax._core.check import readable_bytes
from memjax._explain.line import line
from memjax._explain.parts import Peak, PeakRow, Remedy, Row, Timeline
from memjax._explain.trace import figures_of, trace_of


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Where the activation memory of a training step goes: what `memjax.explain` found.

    `print` gives a table. `plot` draws the memory over the step, `trace` writes it for Perfetto, and `figures` are for loggers.
    `to_json` and `from_json` keep it.

    Attributes:
      rows: what is kept in device memory between the passes, the largest first.
      offloaded: the same of host memory.
      residual_bytes: the sum over `rows`. The same as `memjax.measure(...).residual_bytes`.
      offloaded_bytes: the sum over `offloaded`.
      peak: what is alive when the compiled program needs most; None if the compiler does not tell.
      timeline: what is alive over the whole program; None likewise.
      warnings: what is probably not as it was meant.
      notes: what could not be found out, and why.
      dropped: what `memjax.compressed` does not keep, and from what it is recomputed; and where it encodes nothing.
      line: the line that fits the step into a budget.
    """

    rows: tuple[Row, ...]
    offloaded: tuple[Row, ...]
    residual_bytes: int
    offloaded_bytes: int
    peak: Peak | None
    timeline: Timeline | None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    line: str = line()

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Explanation:
        """What `to_json` wrote.

        Raises:
          ValueError: `text` is something else.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        fields = check.json_fields("Explanation", text, names)
        check.lists("Explanation", text, fields, ("rows", "offloaded", "warnings", "notes", "dropped"))
        try:
            for name in ("residual_bytes", "offloaded_bytes"):
                check.integer(name, fields[name], least=0)
            for name in ("warnings", "notes", "dropped"):
                if not all(isinstance(one, str) for one in fields[name]):
                    raise TypeError(f"{name} must be texts")
            if not isinstance(fields["line"], str):
                raise TypeError("line must be a text")
            return cls(
                rows=tuple(map(_row, fields["rows"])),
                offloaded=tuple(map(_row, fields["offloaded"])),
                residual_bytes=fields["residual_bytes"],
                offloaded_bytes=fields["offloaded_bytes"],
                peak=None if fields["peak"] is None else _peak(fields["peak"]),
                timeline=None if fields["timeline"] is None else Timeline(**_tuples(fields["timeline"])),
                warnings=tuple(fields["warnings"]),
                notes=tuple(fields["notes"]),
                dropped=tuple(fields["dropped"]),
                line=fields["line"],
            )
        except (TypeError, ValueError, KeyError) as error:
            raise check.fail(ValueError, "text", "what Explanation.to_json wrote", text, str(error)) from error

    def plot(self, path: Any) -> None:
        """Draw the memory over the step, stacked by module, into a file: the forward slope, the peak, the backward slope.

        Needs matplotlib.

        Args:
          path: where to, "memory.png" for example; the ending says in which format.

        Raises:
          ValueError: the compiled program is not known (`notes` says why).
        """
        check.path("path", path)
        self._check_timeline()
        _draw(self, path)

    def trace(self, path: Any) -> None:
        """Write the memory over the step as a trace that https://ui.perfetto.dev and chrome://tracing open.

        It has a counter of all temporary bytes, one for each module, and the two passes. One instruction of the compiled program
        is a microsecond, for it does not say how long they take.

        Args:
          path: where to, "memory.json" for example, or an open file of bytes.

        Raises:
          ValueError: the compiled program is not known (`notes` says why).
        """
        check.path("path", path)
        self._check_timeline()
        text = trace_of(self.timeline).encode()
        path.write(text) if hasattr(path, "write") else pathlib.Path(path).write_bytes(text)

    def figures(self) -> dict[str, int]:
        """Bytes by name, for `wandb.log(explanation.figures())`, TensorBoard or a table of runs.

        Returns:
          "residual_bytes", "offloaded_bytes", and "kept/MODULE" for what each module keeps between the passes. If the compiled
          program is known also "peak_bytes", "temp_bytes", and "peak/KIND" for what is alive at the peak.
        """
        return figures_of(self)

    def _check_timeline(self) -> None:
        if self.timeline is None or self.peak is None:
            raise ValueError(f"explanation must have a timeline, got none: {'; '.join(self.notes)}")

    def __repr__(self) -> str:
        largest = self.rows[0].path if self.rows else "nothing"
        held = check.readable_bytes(self.residual_bytes)
        return f"Explanation({held} of residuals in {len(self.rows)} rows, most in {largest})"

    def __str__(self) -> str:
        return as_text(_tables(self), _messages(self))

    def __rich__(self) -> Any:
        return as_rich(_tables(self), _messages(self))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _row(fields: dict[str, Any]) -> Row:
    row = Row(**_tuples(fields))
    return dataclasses.replace(row, remedies=tuple(Remedy(**remedy) for remedy in fields["remedies"]))


def _peak(fields: dict[str, Any]) -> Peak:
    peak = Peak(**_tuples(fields))
    return dataclasses.replace(peak, rows=tuple(PeakRow(**row) for row in fields["rows"]))


# An explanation as text, and as tables of rich.

_ROWS = 12
_NUMBERS = frozenset(("bytes", "share", "count", "predicted", "compiled", "difference"))
_REMEDIES = 6
_PATH = 40  # letters
_LINE = "To fit a budget without changing the model, in place of jax.jit"


Table = tuple[str, list[str], list[list[str]]]
"""A title, the heads of columns, and rows of cells."""


def as_text(tables: Sequence[Table], messages: Sequence[str] = ()) -> str:
    """Tables in columns of plain text."""
    parts = []
    for title, heads, cells in tables:
        widths = [max(len(row[column]) for row in (heads, *cells)) for column in range(len(heads))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (heads, *cells)
        ]
        parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
    return "\n\n".join([*parts, *messages])


def as_rich(tables: Sequence[Table], messages: Sequence[str] = ()) -> Any:
    """The same for `rich.print`, which is only imported here."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown: list[Any] = []
    for title, heads, cells in tables:
        table = Table(title=Text(title), title_justify="left", pad_edge=False)
        for head in heads:
            table.add_column(head, justify="right" if head in _NUMBERS else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))  # brackets are no markup
        shown.append(table)
    return Group(*shown, *map(Text, messages))


def _tables(explanation: Any) -> list[Table]:
    tables = [_kept_table("Kept between the passes", explanation.rows, explanation.residual_bytes)]
    if explanation.offloaded:
        tables.append(_kept_table("Offloaded to the host", explanation.offloaded, explanation.offloaded_bytes))
    if chosen := _remedies(explanation.rows):
        cells = [[readable_bytes(one.saves), f"{one.milliseconds:.2g}", _kind(one), one.how] for one in chosen]
        tables.append(("What would save it", ["bytes", "ms", "kind", "how"], cells))
    peak = explanation.peak
    if peak is not None:
        title = f"Alive at the peak of the compiled program: {readable_bytes(peak.bytes)}"
        title += f" (the compiler reserves {readable_bytes(peak.temp_bytes)})"
        cells = [
            [
                readable_bytes(row.bytes),
                f"{row.bytes / max(peak.bytes, 1):.0%}",
                _short(row.path),
                row.kind,
                str(row.count),
            ]
            for row in peak.rows[:_ROWS]
        ]
        if len(peak.rows) > _ROWS:
            rest = sum(row.bytes for row in peak.rows[_ROWS:])
            cells.append(
                [readable_bytes(rest), f"{rest / peak.bytes:.0%}", f"{len(peak.rows) - _ROWS} more rows", "", ""]
            )
        tables.append((title, ["bytes", "share", "module", "kind", "count"], cells))
        steps = [
            [f"+{readable_bytes(count)}" if index and count > 0 else signed(count), what]
            for index, (what, count) in enumerate(peak.difference)
        ]
        steps.append([readable_bytes(peak.bytes), "the peak"])
        tables.append(("From what is kept to the peak", ["bytes", "what"], steps))
    return tables


def _kept_table(what: str, rows: Sequence[Row], whole: int) -> Table:
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


def signed(count: int) -> str:
    return f"-{readable_bytes(-count)}" if count < 0 else readable_bytes(count)


def _cells(row: Row) -> list[str]:
    arrays = f"{row.dtype}[{','.join(map(str, row.shape))}]" + (f" x{row.count}" if row.count > 1 else "")
    near = [
        f"{name} in {where.rpartition('/')[2]}" if where else name
        for name, _, where in (reader.partition(" in ") for reader in row.readers)
    ]
    readers = ", ".join(near[:2]) + (f" and {len(row.readers) - 2} more" if len(row.readers) > 2 else "")
    remedy = f"{row.remedies[0].kind}, {readable_bytes(row.remedies[0].saves)}" if row.remedies else ""
    return [
        readable_bytes(row.bytes),
        f"{row.share:.0%}",
        _short(row.path),
        arrays,
        row.producer,
        readers,
        row.source,
        remedy,
    ]


def _short(path: str) -> str:
    """A path as tables have it: of a long one its first name, and the last ones, two at least."""
    first, *names = path.split("/")
    shown = path
    for skipped in range(1, len(names) - 1):
        if len(shown) > _PATH:
            shown = "/".join([first, "...", *names[skipped:]])
    return shown


def _kind(remedy: Remedy) -> str:
    return remedy.kind if remedy.is_exact else f"{remedy.kind} (not exact)"


def _messages(explanation: Any) -> list[str]:
    dropped = [f"not kept: {text}" for text in explanation.dropped[:_ROWS]]
    if len(explanation.dropped) > _ROWS:
        dropped.append(f"not kept: {len(explanation.dropped) - _ROWS} more")
    warnings = [f"warning: {text}" for text in explanation.warnings]
    notes = [f"note: {text}" for text in explanation.notes]
    return [*dropped, *warnings, *notes, *([f"{_LINE}: {explanation.line}"] if explanation.rows else [])]


# The plot: temporary memory at each instruction of the compiled program, stacked by module.

_MIB = 2**20


def _draw(explanation: Any, path: Any) -> None:
    """Write the picture. matplotlib is only imported here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline, peak = explanation.timeline, explanation.peak
    assert timeline is not None
    assert peak is not None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    x, series = timeline.instructions, [[count / _MIB for count in line] for line in timeline.bytes]
    colours = [f"C{index}" for index in range(len(series) - 1)] + ["0.8"]
    axes.stackplot(x, series, labels=timeline.modules, colors=colours, step="post", linewidth=0)
    axes.axvline(timeline.backward, color="0.3", linewidth=0.8, linestyle=":")
    axes.axhline(peak.bytes / _MIB, color="0.3", linewidth=0.8)
    axes.annotate(
        "the peak", (0, peak.bytes / _MIB), xytext=(2, 2), textcoords="offset points", fontsize=8, color="0.3"
    )
    axes.annotate(
        "backward pass",
        (timeline.backward, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -10),
        textcoords="offset points",
        fontsize=8,
        color="0.3",
    )
    axes.set(xlabel="instruction of the compiled program", ylabel="temporary memory, MiB", ylim=(0, None))
    axes.margins(x=0)
    axes.set_ylim(0, 1.12 * peak.bytes / _MIB)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)
