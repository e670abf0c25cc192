"""Records of a run: one JSON object per line, each with a `kind` and the optimizer `step` it belongs to."""

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.harness import files
from experiments.harness.errors import ExperimentError


class Records:
    """Appends to a file of records. A line is on its way to the disk when `append` returns.

    Raises:
      ExperimentError: the file cannot be written, for instance because the disk is full.
    """

    def __init__(self, path: Path):
        self._path = path
        with files.writing(path):
            self._file = path.open("ab", buffering=0)  # nothing is left to write, and to fail, at the end

    def append(self, kind: str, step: int, **values: float | str | list[float]) -> None:
        line = json.dumps({"kind": kind, "step": step, **values}) + "\n"
        rest = memoryview(line.encode())
        with files.writing(self._path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()


def read(path: Path, kind: str | None = None, *, numbers: Sequence[str] = ()) -> list[dict]:
    """All records, or those of one kind. A last line cut short by a kill is left out.

    Args:
      path: the file; if there is none, there are no records.
      kind: which records.
      numbers: fields that each of them must have, with a number in it.

    Raises:
      ExperimentError: a line is damaged.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ExperimentError(f"cannot read {path}: {error.strerror}") from error
    records = []
    for i, line in enumerate(lines):
        if not line or (i == len(lines) - 1 and not line.endswith(b"}")):
            continue
        try:
            record = json.loads(line)
            wanted = kind is None or record["kind"] == kind
            usable = type(record["step"]) is int and isinstance(record["kind"], str)
            if wanted:
                usable &= all(type(record[name]) in (int, float) for name in numbers)
        except (ValueError, TypeError, KeyError):
            usable = False
        if not usable:
            raise ExperimentError(
                f"{path} is damaged in line {i + 1}: delete this line, or put back a copy of the file"
            )
        if wanted:
            records.append(record)
    return records


def keep_until(path: Path, step: int) -> None:
    """Removes the records of later steps: a resumed run will make them again."""
    kept = [record for record in read(path) if record["step"] <= step]
    files.write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
