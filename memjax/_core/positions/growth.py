"""What follows from a large product with its positions kept apart: equations, with the states of what they read and make."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any

from memjax._core.compat import derivatives, is_backward, name_stack, primitive_name
from memjax._core.positions.rules import apply_rule
from memjax._core.positions.walk import Mixed, Positions, Shared, State, Summed, shape_of, shared
from memjax._core.positions.walk import Walk as WalkOfStates
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import Walk, is_literal
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import CHECKPOINTS, COLLECTIVES, LOOPS, RANDOM, REPLICATIONS, expensive

_MOST_OPERANDS = 3  # from outside, of one equation
_LEFT_OUT = LOOPS | COLLECTIVES | RANDOM | CHECKPOINTS


class Sources:
    """What the variables of a program follow from cheaply."""

    def __init__(self, program: Program):
        self._makers, self._known = program.flow.makers, dict[Any, int]()

    def behind(self, var: Any) -> Iterator[tuple[Any, bool]]:
        """A variable, and what it follows cheaply from: each with whether it does so from more."""
        walk = Walk([var])
        for one in walk:
            eqn: Any = self._makers.get(one)
            is_cheap = eqn is not None and not expensive(eqn)
            walk.add(eqn.invars if is_cheap else ())
            yield one, is_cheap

    def nbytes(self, var: Any) -> int:
        """Bytes of a variable, or of what it follows cheaply from, if these are fewer."""
        if var not in self._known:
            own, nbytes = array_bytes(var), 0
            for one, is_cheap in self.behind(var):
                nbytes += 0 if is_cheap else array_bytes(one)
                if nbytes >= own:
                    break
            self._known[var] = min(nbytes, own)
        return self._known[var]


class Growth:
    """The equations that follow from a product, as far as they keep positions apart.

    With gradients it could go on, from layer to layer, and read what each of them has kept. It ends where more bytes with
    positions go in than the product has.

    Args:
      program: straight lines of equations.
      sources: what follows from what there.
      seed: number of the product.
      dim: of its result, which holds positions.
      leading: variables that the program's backward passes depend on; None: there are none.

    Attributes:
      length: the number of positions.
      inside: numbers of the equations, in order; none if gradients depend on something that mixes positions.
      entered: for each of them, with gradients, bytes with positions that have gone in.
      states: of the values that they make.
      operands: by number, the states of what an equation reads.
    """

    def _begin(
        self, program: Program, sources: Sources, seed: int, length: int, leading: Collection[Any] | None = None
    ) -> None:
        """Nothing has grown yet."""
        self.program, self.sources, self.seed, self.length, self.leading = program, sources, seed, length, leading
        self._walk = WalkOfStates(length, True, apply_rule)
        self.states: dict[Any, State] = {}
        self.operands: dict[int, list[State]] = {}
        self.inside: list[int] = []
        self.entered: list[int] = []
        self._merged: dict[tuple[Any, int], bool] = {}
        self._read: set[Any] = set()  # variables with positions that the region reads from outside

    def __init__(self, program: Program, sources: Sources, seed: int, dim: int, leading: Collection[Any] | None):
        self.dim = dim
        self._begin(program, sources, seed, shape_of(program.eqns[seed].outvars[0])[dim], leading)
        most = array_bytes(program.eqns[seed].outvars[0])
        behind: set[Any] = set()  # what follows from the region outside of it
        for i in range(seed, len(program.eqns)):
            if self.entered and self.entered[-1] > most:
                return
            eqn, reads = program.eqns[i], program.flow.reads[i]
            if i == seed:
                self._add(i, Positions(dim, 1))
            elif not behind.isdisjoint(reads):
                behind.update(eqn.outvars)
            elif any(var in self.states for var in reads) and not self._add(i, None):
                behind.update(eqn.outvars)
                if not self.inside or self._needs_all(eqn):
                    self.inside = []
                    return

    def _needs_all(self, eqn: Any) -> bool:
        """Whether gradients depend on an equation of the forward pass. If it mixes positions, no tile alone gives gradients."""
        if self.leading is None or not any(out in self.leading for out in eqn.outvars):
            return False
        stack = name_stack(eqn)  # an update of parameters has no mark: the next gradient depends on it, not this one
        return bool(derivatives(stack)) and not is_backward(stack)

    def _add(self, i: int, wanted: State | None) -> bool:
        """Take an equation in, if that keeps positions apart, and its result is `wanted`, if that is given."""
        found = self.kept_apart(i, wanted)
        if found is None:
            return False
        self.operands[i], outs = found
        new = {
            atom
            for atom, state in zip(self.program.eqns[i].invars, found[0], strict=True)
            if isinstance(state, Positions) and atom not in self.states and atom not in self._read
        }
        self._read |= new
        before = self.entered[-1] if self.entered else 0
        self.entered.append(before + sum(map(self.sources.nbytes, new)) if self.leading is not None else 0)
        self.states |= zip(self.program.eqns[i].outvars, outs, strict=True)
        self.inside.append(i)
        return True

    def kept_apart(self, i: int, wanted: State | None) -> tuple[list[State], list[State]] | None:
        """States of the operands of an equation, and of its results."""
        eqn = self.program.eqns[i]
        if eqn.effects or primitive_name(eqn) in _LEFT_OUT or primitive_name(eqn).startswith("random_"):
            return None
        if sum(var not in self.states for var in self.program.flow.reads[i]) > _MOST_OPERANDS:
            return None
        is_inside = lambda atom: not is_literal(atom) and atom in self.states
        choices = [[self.states[atom]] if is_inside(atom) else list(self._possible(atom)) for atom in eqn.invars]
        for operands in itertools.product(*choices):
            if not any(isinstance(state, Positions | Summed) for state in operands):
                continue
            try:
                outs = apply_rule(self._walk, eqn, list(operands))
            except Mixed:
                continue
            if wanted is None or outs[0] == wanted:
                return list(operands), outs
        return None

    def _possible(self, atom: Any) -> Iterator[State]:
        """What an operand from outside may be; the first that fits is taken."""
        shape = shape_of(atom)
        if self.is_constant(atom):
            yield Shared((False,) * len(shape))
            return
        yield shared(shape)
        if not is_literal(atom):
            for dim, size in enumerate(shape):
                if size == self.length:
                    yield Positions(dim, 1)
            for dim, size in enumerate(shape):
                if size > self.length and size % self.length == 0 and self.is_merged(atom, dim):
                    yield Positions(dim, size // self.length)

    def is_merged(self, var: Any, dim: int) -> bool:
        """Whether a dimension of an operand from outside is merged of one of positions and others, as labels in one row are."""
        if (var, dim) not in self._merged:
            i = self.program.flow.place.get(var)
            found = None
            if i is not None and not expensive(self.program.eqns[i]):
                found = self.kept_apart(i, Positions(dim, shape_of(var)[dim] // self.length))
            self._merged[var, dim] = found is not None
        return self._merged[var, dim]

    def is_constant(self, atom: Any) -> bool:
        """Whether it is one number, repeated."""
        eqn = None if is_literal(atom) else self.program.flow.makers.get(atom)
        if eqn is not None and eqn.primitive.name in REPLICATIONS:
            return self.is_constant(eqn.invars[0])
        return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and not shape_of(eqn.invars[0])
