"""Which arrays the user wants encoded: `where` and `smallest` of `memjax.compressed`."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any

from memjax._core.compat import scope

SMALL = 4096
"""Arrays of fewer values are kept as they are, masks too: less than one tile of a code."""


@dataclasses.dataclass(frozen=True)
class Which:
    """What to encode.

    Attributes:
      where: see `compressed`.
      smallest: number of values of an array below which it is left alone.
      outer: the scope of the loop around the program, "" if there is none.
      needed: whether a `where` that matches nothing is a mistake: not in the parts of a module.
    """

    where: Any = None
    smallest: int = SMALL
    outer: str = ""
    needed: bool = True

    def within(self, scope: str) -> Which:
        """The same for the body of a loop in this scope."""
        return dataclasses.replace(self, outer=_joined(self.outer, scope))

    def scope(self, eqn: Any) -> str:
        """The scope of an equation, that of the loop around it included."""
        return _joined(self.outer, scope(eqn))

    def matches(self, uses: Sequence[tuple[Any, Any]], aval: Any) -> bool:
        """Whether `where` selects an array of type `aval`, given pairs of an equation and the variable that it reads."""
        if self.where is None:
            return True
        if self.where == "conv":
            return any(eqn.primitive.name == "conv_general_dilated" and eqn.invars[0] is var for eqn, var in uses)
        if callable(self.where):
            return any(self.where(self.scope(eqn), aval) for eqn, _ in uses)
        return any(matches(self.scope(eqn), self.where) for eqn, _ in uses)


def _joined(outer: str, inner: str) -> str:
    return "/".join(filter(None, (outer, inner)))


def matches(path: str, pattern: str) -> bool:
    """Whether `pattern` matches consecutive names in `path`, "a/b/c", those of a module or of modules that contain it."""
    parts = path.split("/")
    runs = ("/".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(run, pattern) for run in runs)
