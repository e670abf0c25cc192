"""Records of a run: one JSON object per line, each with a `kind` and the optimizer `step` it belongs to."""

import json
import os
from pathlib import Path


class Records:
    """Appends to a file of records. A line is on its way to the disk when `append` returns."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def append(self, kind: str, step: int, **values: float | str | list[float]) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path, kind: str | None = None) -> list[dict]:
    """All records, or those of one kind. A last line cut short by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.endswith("}"):
            record = json.loads(line)
            if kind is None or record["kind"] == kind:
                records.append(record)
    return records


def keep_until(path: Path, step: int) -> None:
    """Removes the records of later steps: a resumed run will make them again."""
    kept = [record for record in read(path) if record["step"] <= step]
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(rewritten, path)  # in one piece: a kill leaves the old or the new file
