"""Alike arrays in one row: those of layers that repeat, and of the turns of a loop."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memjax._core.compat import primitive_name
from memjax._core.program.scopes import Paths, line_of
from memjax._explain.kept import Kept

_NUMBER = re.compile(r"(.*?)(?:_?(\d+)|\[(\d+)\])$")


@dataclass(frozen=True)
class Group:
    """Arrays of one shape, dtype and origin, from modules that differ in numbers only."""

    path: str
    arrays: tuple[Kept, ...]
    paths: tuple[str, ...]
    producer: str
    source: str
    why: str = ""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def groups(arrays: Iterable[Kept], paths: Paths) -> list[Group]:
    """The groups, the largest first."""
    found: dict[tuple, list[tuple[str, Kept]]] = {}
    for array in arrays:
        # What a library's function makes under `jax.checkpoint` has no line of the user's: its readers have.
        near = next((place for place in (array.place, *array.readers) if paths.of(place)), array.place)
        path, line = paths.of(near), line_of(near)
        producer = primitive_name(array.place[-1])
        aval = array.value.aval
        key = (template(path), aval.shape, str(aval.dtype), producer, line, array.forward.turns, array.value.why)
        found.setdefault(key, []).append((path, array))
    made = [
        Group(
            collapsed([path for path, _ in members]),
            tuple(array for _, array in members),
            tuple(path for path, _ in members),
            key[3],
            key[4],
            key[6],
        )
        for key, members in found.items()
    ]
    return sorted(made, key=lambda group: -group.nbytes)


def template(path: str) -> str:
    """The path without its numbers."""
    return "/".join(f"{name}[]" if number is not None else name for name, number in map(_numbered, path.split("/")))


def collapsed(paths: Sequence[str]) -> str:
    """Paths of one template as one: "layers_0/mlp" and "layers_1/mlp" are "layers[0..1]/mlp"."""
    columns = zip(*(path.split("/") for path in dict.fromkeys(paths)), strict=True)
    return "/".join(_range(list(dict.fromkeys(column))) for column in columns)


def _range(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(number for _, number in map(_numbered, parts) if number is not None)
    name = _numbered(parts[0])[0]
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{name}[{numbers[0]}..{numbers[-1]}]"
    return f"{name}[{','.join(map(str, numbers))}]"


def _numbered(part: str) -> tuple[str, int | None]:
    match = _NUMBER.match(part)
    return (match[1], int(match[2] or match[3])) if match else (part, None)
