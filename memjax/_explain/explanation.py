"""What `memjax.explain` returns: plain data, printed as a table, drawn, and written as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from memjax._core import check
from memjax._explain.parts import Peak, PeakRow, Remedy, Row, Timeline
from memjax._explain.picture import draw
from memjax._explain.table import as_rich, as_text


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Where the activation memory of a training step goes: what `memjax.explain` found.

    `print` gives a table. `plot` draws the memory over the step. `to_json` and `from_json` keep it.

    Attributes:
      rows: what is kept in device memory between the passes, the largest first.
      offloaded: the same of host memory.
      residual_bytes: the sum over `rows`. The same as `memjax.measure(...).residual_bytes`.
      offloaded_bytes: the sum over `offloaded`.
      peak: what is alive when the compiled program needs most; None if the compiler does not tell.
      timeline: what is alive over the whole program; None likewise.
      warnings: what is probably not as it was meant.
      notes: what could not be found out, and why.
      dropped: what `memjax.compressed` does not keep, and from what it is computed again; and where it encodes nothing.
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
                if not all(isinstance(line, str) for line in fields[name]):
                    raise TypeError(f"{name} must be texts")
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
        if self.timeline is None or self.peak is None:
            raise ValueError(f"explanation must have a timeline, got none: {'; '.join(self.notes)}")

        draw(self, path)

    def __repr__(self) -> str:
        largest = self.rows[0].path if self.rows else "nothing"
        held = check.readable_bytes(self.residual_bytes)
        return f"Explanation({held} of residuals in {len(self.rows)} rows, most in {largest})"

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> Any:
        return as_rich(self)


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
