"""What depends on what in straight lines of equations: who makes a variable, who reads it, what is needed for what."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from memjax._core.program.primitives import ALIASES

_Literal = core.Literal


def is_literal(atom: Any) -> bool:
    return isinstance(atom, _Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, _Literal)]  # planning spends much of its time here


def renamed(atoms: Iterable[Any], names: Mapping[Any, Any]) -> list[Any]:
    """The atoms, other ones in place of some variables."""
    return [atom if isinstance(atom, _Literal) else names.get(atom, atom) for atom in atoms]


def reading(eqn: Any, names: Mapping[Any, Any]) -> Any:
    """The equation, reading other variables in place of some; itself if it reads none of these, as it is the most often."""
    if any(not isinstance(atom, _Literal) and atom in names for atom in eqn.invars):
        return eqn.replace(invars=renamed(eqn.invars, names))
    return eqn


def made_by(eqns: Iterable[Any]) -> dict[Any, None]:
    """What the equations make, in order."""
    return dict.fromkeys(out for eqn in eqns for out in eqn.outvars)


def read_by(eqns: Iterable[Any]) -> dict[Any, None]:
    """What the equations read, in order, whoever makes it."""
    return dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, _Literal))


def aliases(eqns: Iterable[Any], before: Mapping[Any, Any] | None = None) -> dict[Any, Any]:
    """The variable whose bytes each reshaped, or otherwise renamed, variable has, those found `before` included."""
    found: dict[Any, Any] = dict(before or {})
    for eqn in eqns:
        if eqn.primitive.name in ALIASES and len(eqn.invars) == len(eqn.outvars):
            for atom, out in zip(eqn.invars, eqn.outvars, strict=True):
                if not is_literal(atom):
                    found[out] = found.get(atom, atom)
    return found


class Dataflow:
    """The dependences of equations, each found once, when it is asked for. Equations go by their numbers here.

    Args:
      eqns: in an order in which they can run.
    """

    def __init__(self, eqns: Sequence[Any]):
        self.eqns = eqns

    @functools.cached_property
    def reads(self) -> list[list[Any]]:
        """What each equation reads."""
        return [variables(eqn.invars) for eqn in self.eqns]

    @functools.cached_property
    def place(self) -> dict[Any, int]:
        """The number of the equation that makes a variable."""
        return {out: i for i, eqn in enumerate(self.eqns) for out in eqn.outvars}

    @functools.cached_property
    def makers(self) -> dict[Any, Any]:
        """The equation that makes a variable, itself."""
        return {out: eqn for eqn in self.eqns for out in eqn.outvars}

    @functools.cached_property
    def read(self) -> dict[Any, None]:
        """What is read, in order."""
        return dict.fromkeys(itertools.chain.from_iterable(self.reads))

    @functools.cached_property
    def outside(self) -> dict[Any, None]:
        """What of that none of them makes."""
        place = self.place
        return dict.fromkeys(var for var in self.read if var not in place)

    @functools.cached_property
    def readers(self) -> dict[Any, list[int]]:
        """The equations that read a variable, each once, in order."""
        found: dict[Any, list[int]] = {}
        for i, reads in enumerate(self.reads):
            for var in dict.fromkeys(reads):
                found.setdefault(var, []).append(i)
        return found

    @functools.cached_property
    def consumers(self) -> dict[Any, list[Any]]:
        """The equations that read a variable, themselves."""
        return {var: [self.eqns[i] for i in numbers] for var, numbers in self.readers.items()}

    @functools.cached_property
    def names(self) -> dict[Any, Any]:
        """By variable that is another name for the bytes of a variable, that one."""
        return aliases(self.eqns)

    @functools.cached_property
    def roots(self) -> list[set[Any]]:
        """What each equation reads, by these names."""
        return self.roots_by(self.names)

    @functools.cached_property
    def acting(self) -> list[int]:
        """The equations with effects, which run whoever reads what they make."""
        return [i for i, eqn in enumerate(self.eqns) if eqn.effects]

    def reordered(self, order: Sequence[int]) -> Dataflow:
        """The same equations in another order in which they can run."""
        found = Dataflow([self.eqns[i] for i in order])
        found.reads, found.roots, found.names = (
            [self.reads[i] for i in order],
            [self.roots[i] for i in order],
            self.names,
        )
        return found

    def roots_by(self, names: Mapping[Any, Any]) -> list[set[Any]]:
        """What each equation reads, by other names."""
        get = names.get
        return [{get(var, var) for var in reads} for reads in self.reads]

    def last_reader(self, var: Any) -> int:
        """The last equation that reads a variable; -1 if none does."""
        return self.readers[var][-1] if var in self.readers else -1

    def needed(self, wanted: Iterable[Any], known: Collection[Any] = (), always: Iterable[int] = ()) -> list[Any]:
        """The equations that lead from `known` variables to `wanted` ones, and those that `always` run with what they need."""
        place, reads, chosen = self.place, self.reads, set(always)
        pending = variables(wanted)
        for number in chosen:
            pending += reads[number]
        while pending:
            var = pending.pop()
            i = None if var in known else place.get(var)
            if i is not None and i not in chosen:
                chosen.add(i)
                pending += reads[i]
        return [self.eqns[i] for i in sorted(chosen)]

    def following(
        self, start: Iterable[Any], passes: Callable[[Any], bool], reads: Sequence[Iterable[Any]] | None = None
    ) -> set[Any]:
        """`start`, and what equations that pass make of that, or of nothing; `reads` instead of what they read."""
        found = set(start)
        for eqn, read in zip(self.eqns, self.reads if reads is None else reads, strict=True):
            if found.issuperset(read) and passes(eqn):
                found.update(eqn.outvars)
        return found

    def depending(self, start: Iterable[Any], passes: Callable[[Any], bool] = lambda eqn: True) -> set[Any]:
        """`start`, and what equations that pass make of any of that."""
        found = set(start)
        for eqn, read in zip(self.eqns, self.reads, strict=True):
            if not found.isdisjoint(read) and passes(eqn):
                found.update(eqn.outvars)
        return found


def flow_of(eqns: Sequence[Any] | Dataflow) -> Dataflow:
    """The dependences of equations, if they are not that already."""
    return eqns if isinstance(eqns, Dataflow) else Dataflow(eqns)


class Walk:
    """An iterator over variables to which more are added on the way. It gives each variable once, the latest first."""

    def __init__(self, start: Iterable[Any]):
        self._pending: list[Any] = []
        self._seen: set[Any] = set()
        self.add(start)

    def add(self, atoms: Iterable[Any]) -> None:
        """Visit these, too; literals are left out."""
        new = [var for var in dict.fromkeys(variables(atoms)) if var not in self._seen]
        self._seen.update(new)
        self._pending += new

    def __iter__(self) -> Iterator[Any]:
        while self._pending:
            yield self._pending.pop()
