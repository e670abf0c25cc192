"""Parts of a program that may run tile by tile: from a large product on, as far as positions do not mix.

A product whose result is large beside what goes in is a seed: logits, the hidden values of a feed-forward layer. For each of
its dimensions the region grows along the equations in which the walk of this package keeps positions apart, up to where the
fewest bytes come out: a sum over positions, or one array of the width of the residual stream. Operands from outside hold
positions too where that is the only way for an equation to keep them apart (labels, a mask). Large ones that follow cheaply
from small ones (one-hot labels) are made inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from memjax._core.compat import derivatives, is_backward, name_stack, primitive_name
from memjax._core.positions.rules import apply_rule
from memjax._core.positions.walk import Mixed, Positions, Shared, State, Summed, shape_of, shared
from memjax._core.positions.walk import Walk as WalkOfStates
from memjax._core.program.costs import array_bytes
from memjax._core.program.jaxpr import Program, Walk, consumers, is_literal, producers, variables
from memjax._core.program.primitives import (
    CHECKPOINTS,
    COLLECTIVES,
    LOOPS,
    RANDOM,
    REPLICATIONS,
    VIEWS,
    expensive,
)

_LARGE = 4  # times what goes in and comes out: less is not worth a loop
_SMALL = 8  # times smaller than the seed: not worth making inside
_LEAST_LENGTH = 4
_LARGEST_SUM = 1024  # elements
_MOST_OPERANDS = 3  # from outside, of one equation
_TRANSPOSES = VIEWS - {"convert_element_type", "copy"}
_LEFT_OUT = LOOPS | COLLECTIVES | RANDOM | CHECKPOINTS


class Region(NamedTuple):
    """A part of a program that may run tile by tile.

    Attributes:
      seed: number of the equation whose result is large.
      dim: of that result, which holds positions.
      length: how many.
      eqns: of the region, in order.
      shared: variables that all tiles read.
      mapped: variables of which each tile reads its positions, and in which dimension these are. None is in both.
      outs: variables that are read outside.
      axes: where these have their positions; None: sums.
    """

    seed: int
    dim: int
    length: int
    eqns: list[Any]
    shared: list[Any]
    mapped: list[tuple[Any, int]]
    outs: list[Any]
    axes: list[int | None]

    @property
    def product(self) -> Any:
        """The equation whose result is large."""
        return next(eqn for eqn in self.eqns if primitive_name(eqn) == "dot_general")

    @property
    def moved(self) -> int:
        """Bytes with positions that go in and come out."""
        return sum(array_bytes(var) for var, _ in self.mapped) + sum(map(array_bytes, self.outs))


def regions(program: Program, *, gradients: bool = False) -> list[Region]:
    """The regions of a program that do not overlap, the largest first.

    Args:
      program: straight lines of equations.
      gradients: it has gradients in it, which are sums over positions of any size: those of what tiles share.
    """
    flow = _Flow(program, gradients)
    taken: set[int] = set()
    found: list[Region] = []
    for seed in _seeds(program):
        if seed in taken:
            continue
        grown = [region for dim in _free_dims(program.eqns[seed]) if (region := _grown(flow, seed, dim))]
        if not grown:
            continue
        best = min(grown, key=lambda region: (region.moved, -region.length))
        mine = {id(eqn) for eqn in best.eqns}
        places = {i for i, eqn in enumerate(program.eqns) if id(eqn) in mine}
        if taken.isdisjoint(places):
            taken |= places
            found.append(best)
    return found


def _seeds(program: Program) -> list[int]:
    large = []
    for i, eqn in enumerate(program.eqns):
        if primitive_name(eqn) == "dot_general" and next(iter(_free_dims(eqn)), None) is not None:
            large.append((-array_bytes(eqn.outvars[0]), i))
    return [i for _, i in sorted(large)]


def _free_dims(eqn: Any) -> Iterator[int]:
    """The dimensions of a product that come from an operand that is small beside the result."""
    (contracted, _), batch = eqn.params["dimension_numbers"]
    left, right = eqn.invars
    if any(batch):
        return
    first = len(shape_of(left)) - len(contracted)
    for dim, size in enumerate(shape_of(eqn.outvars[0])):
        operand = left if dim < first else right
        if size >= _LEAST_LENGTH and array_bytes(eqn.outvars[0]) >= _LARGE * array_bytes(operand):
            yield dim


def _grown(flow: _Flow, seed: int, dim: int) -> Region | None:
    length = shape_of(flow.program.eqns[seed].outvars[0])[dim]
    growth = _Growth(flow, seed, dim, length)
    region = growth.region()
    if region is None or region.moved * _LARGE > growth.seed_bytes * 2:
        return None
    return region


class _Flow:
    """Where the variables of a program are made and read.

    Attributes:
      program: it.
      gradients: whether it has gradients in it.
      makers, readers: equations by variable.
      reads: by number of an equation, the variables that it reads.
      leading: if there are gradients, the variables that backward passes depend on.
    """

    def __init__(self, program: Program, gradients: bool):
        self.program, self.gradients = program, gradients
        self.makers, self.readers = producers(program), consumers(program)
        self.reads = [variables(eqn.invars) for eqn in program.eqns]
        self.leading: set[Any] = set()
        if gradients:
            for eqn, reads in zip(reversed(program.eqns), reversed(self.reads), strict=True):
                if is_backward(name_stack(eqn)) or not self.leading.isdisjoint(eqn.outvars):
                    self.leading.update(reads)


class _Growth:
    """A region that grows from a product, `dim` of its result holding positions."""

    def __init__(self, flow: _Flow, seed: int, dim: int, length: int):
        self._flow, self._seed, self._dim, self._length = flow, seed, dim, length
        self._program, self._gradients = flow.program, flow.gradients
        self._walk = WalkOfStates(length, True, apply_rule)
        self._makers, self._readers = flow.makers, flow.readers
        self.seed_bytes = array_bytes(self._program.eqns[seed].outvars[0])
        self._states: dict[Any, State] = {}  # of the values made inside the region
        self._operands: dict[int, list[State]] = {}  # by equation
        self._grow()

    def _grow(self) -> None:
        eqns = self._program.eqns
        first = eqns[self._seed]
        wanted = Positions(self._dim, 1)
        self._inside: list[Any] = []
        behind: set[Any] = set()  # what follows from the region outside of it
        for i in range(self._seed, len(eqns)):
            eqn, reads = eqns[i], self._flow.reads[i]
            if eqn is first:
                self._add(eqn, wanted)
            elif not behind.isdisjoint(reads):
                behind.update(eqn.outvars)
            elif any(var in self._states for var in reads) and not self._add(eqn, None):
                behind.update(eqn.outvars)
                if not self._inside or self._needs_all(eqn):
                    self._inside = []
                    return

    def _needs_all(self, eqn: Any) -> bool:
        """Whether gradients depend on an equation of the forward pass that mixes positions: they are not known tile by tile."""
        if not self._gradients or self._flow.leading.isdisjoint(eqn.outvars):
            return False
        stack = name_stack(eqn)  # an update of parameters has no mark: the next gradient depends on it, not this one
        return bool(derivatives(stack)) and not is_backward(stack)

    def _add(self, eqn: Any, wanted: State | None) -> bool:
        """Take an equation in, if that keeps positions apart, and its result is `wanted`, if that is given."""
        found = self._kept_apart(eqn, wanted)
        if found is None:
            return False
        operands, outs = found
        self._operands[id(eqn)] = operands
        self._states |= zip(eqn.outvars, outs, strict=True)
        self._inside.append(eqn)
        return True

    def _kept_apart(self, eqn: Any, wanted: State | None) -> tuple[list[State], list[State]] | None:
        """States of the operands of an equation, and of its results."""
        if eqn.effects or primitive_name(eqn) in _LEFT_OUT or primitive_name(eqn).startswith("random_"):
            return None
        outside = [i for i, atom in enumerate(eqn.invars) if not is_literal(atom) and atom not in self._states]
        if len(outside) > _MOST_OPERANDS:
            return None
        choices = [
            [self._states[atom]] if not is_literal(atom) and atom in self._states else list(self._possible(atom))
            for atom in eqn.invars
        ]
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
        if self._is_constant(atom):
            yield Shared((False,) * len(shape))
            return
        yield shared(shape)
        if not is_literal(atom):
            for dim, size in enumerate(shape):
                if size == self._length:
                    yield Positions(dim, 1)

    def _is_constant(self, atom: Any) -> bool:
        """Whether it is one number, repeated."""
        eqn = None if is_literal(atom) else self._makers.get(atom)
        if eqn is not None and eqn.primitive.name in REPLICATIONS:
            return self._is_constant(eqn.invars[0])
        return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and not shape_of(eqn.invars[0])

    def region(self) -> Region | None:
        """The part of what has grown out of which the fewest bytes come."""
        inside = self._narrowest()
        if not inside:
            return None
        chosen = {id(eqn) for eqn in inside}
        made = {out for eqn in inside for out in eqn.outvars}
        outs = [var for var in self._read_outside(chosen) if var in made]
        states = [self._states[var] for var in outs]
        if not outs or any(isinstance(state, Positions) and state.inner != 1 for state in states):
            return None
        axes = [state.dim if isinstance(state, Positions) else None for state in states]
        # Else the features of a hidden layer would be taken for positions, and its result for a sum over them.
        large = (axis is None and var.aval.size > _LARGEST_SUM for var, axis in zip(outs, axes, strict=True))
        if not self._gradients and any(large):
            return None
        if any(axis is not None and shape_of(var)[axis] != self._length for var, axis in zip(outs, axes, strict=True)):
            return None
        common: list[Any] = []
        mapped: dict[tuple[Any, int], None] = {}
        for eqn in inside:
            for atom, state in zip(eqn.invars, self._operands[id(eqn)], strict=True):
                if not is_literal(atom) and atom not in made:
                    if isinstance(state, Positions):
                        mapped[atom, state.dim] = None
                    else:
                        common.append(atom)
        before: dict[int, Any] = {}
        kept = [(var, dim) for var, dim in mapped if not self._made_inside(var, dim, before)]
        common = [var for var in common if not self._absorb_view(var, before)]
        for eqn in before.values():  # what these read
            for atom, state in zip(eqn.invars, self._operands[id(eqn)], strict=True):
                maker = None if is_literal(atom) else self._makers.get(atom)
                if not is_literal(atom) and id(maker) not in before:
                    if isinstance(state, Positions):
                        kept.append((atom, state.dim))
                    else:
                        common.append(atom)
        constants: dict[int, Any] = {}
        common = [var for var in common if not self._absorb_constant(var, constants)]
        before |= constants
        for eqn in constants.values():  # the number that is repeated
            read = variables(eqn.invars)
            common += [var for var in read if var not in made and id(self._makers.get(var)) not in before]
        kept, common = list(dict.fromkeys(kept)), list(dict.fromkeys(common))
        if len({var for var, _ in kept}) < len(kept) or {var for var, _ in kept}.intersection(common):
            return None
        order = {id(eqn): i for i, eqn in enumerate(self._program.eqns)}
        every = sorted([*before.values(), *inside], key=lambda eqn: order[id(eqn)])
        return Region(self._seed, self._dim, self._length, every, common, kept, outs, axes)

    def _narrowest(self) -> list[Any]:
        """The first equations of the region, so many that the fewest bytes are read outside of them."""
        if not self._inside:
            return []
        number = {id(eqn): i for i, eqn in enumerate(self._inside)}
        last: dict[Any, float] = {}
        for i in range(self._seed, len(self._program.eqns)):
            eqn = self._program.eqns[i]
            for var in self._flow.reads[i]:
                last[var] = max(last.get(var, -1), number.get(id(eqn), len(number)))
        last |= dict.fromkeys(variables(self._program.outvars), len(number))
        best, count = self.seed_bytes, 0
        alive: dict[Any, int] = {}
        made = {out for eqn in self._inside for out in eqn.outvars}
        entered: dict[Any, int] = {}  # with positions
        for i, eqn in enumerate(self._inside):
            if self._gradients:  # the region could go on, from layer to layer, and read what each of them has kept
                given = zip(eqn.invars, self._operands[id(eqn)], strict=True)
                entered |= {
                    atom: self._bytes_behind(atom)
                    for atom, state in given
                    if isinstance(state, Positions) and atom not in made and atom not in entered
                }
            alive |= {out: array_bytes(out) for out in eqn.outvars if last.get(out, -1) > i}
            alive = {var: nbytes for var, nbytes in alive.items() if last[var] > i}
            total = sum(alive.values()) + sum(entered.values())
            # What is done to a sum alone, a division by a count, belongs to it: gradients are rounded once then.
            sums = all(isinstance(self._states[var], Summed) for var in alive)
            if total < best or (total == best and sums):
                best, count = total, i + 1
        return self._inside[:count]

    def _bytes_behind(self, var: Any) -> int:
        """Bytes of a variable, or of what it follows cheaply from, if these are fewer."""
        walk, nbytes = Walk([var]), 0
        for one in walk:
            eqn = self._makers.get(one)
            if eqn is None or expensive(eqn):
                nbytes += array_bytes(one)
            else:
                walk.add(eqn.invars)
            if nbytes >= array_bytes(var):
                return array_bytes(var)
        return nbytes

    def _read_outside(self, chosen: set[int]) -> list[Any]:
        every = zip(self._program.eqns, self._flow.reads, strict=True)
        read = [var for eqn, reads in every if id(eqn) not in chosen for var in reads]
        return list(dict.fromkeys([*read, *variables(self._program.outvars)]))

    def _made_inside(self, var: Any, dim: int, before: dict[int, Any]) -> bool:
        """Make an operand inside if what that reads with positions is much smaller."""
        trial = dict(before)
        if not self._absorb(var, Positions(dim, 1), trial):
            return False
        read = {
            atom
            for eqn in trial.values()
            for atom, state in zip(eqn.invars, self._operands[id(eqn)], strict=True)
            if isinstance(state, Positions) and id(self._makers.get(atom)) not in trial
        }
        largest = max(array_bytes(out) for eqn in trial.values() for out in eqn.outvars)
        if 2 * sum(map(array_bytes, read)) > largest:
            return False
        before |= trial
        return True

    def _absorb(self, var: Any, state: Positions, before: dict[int, Any]) -> bool:
        """Make an operand inside that is large, or is made from what is, if it follows cheaply from what is small."""
        eqn = self._makers.get(var)
        if eqn is None or (expensive(eqn) and not self._is_ours(eqn)):
            return False
        if not self._is_large_behind(var):
            return False
        if id(eqn) in before:
            return self._states[var] == state
        if len(eqn.outvars) > 1:
            return False
        found = self._kept_apart(eqn, state)
        if found is None:
            return False
        self._operands[id(eqn)], (self._states[var],) = found
        before[id(eqn)] = eqn
        for atom, one in zip(eqn.invars, found[0], strict=True):
            if isinstance(one, Positions):
                self._absorb(atom, one, before)
        return True

    def _is_large_behind(self, var: Any) -> bool:
        """Whether a variable, or what it follows cheaply from, is large beside the seed."""
        walk = Walk([var])
        for one in walk:
            if array_bytes(one) * _SMALL >= self.seed_bytes:
                return True
            eqn = self._makers.get(one)
            if eqn is not None and not expensive(eqn):
                walk.add(eqn.invars)
        return False

    def _is_ours(self, eqn: Any) -> bool:
        """Whether it is a product that nothing outside of the region reads: the gate of a feed-forward layer."""
        inside = {id(one) for one in self._inside}
        readers = self._readers.get(eqn.outvars[0], [])
        return primitive_name(eqn) == "dot_general" and all(id(reader) in inside for reader in readers)

    def _absorb_constant(self, var: Any, before: dict[int, Any]) -> bool:
        return self._is_constant(var) and self._absorb_view(var, before)

    def _absorb_view(self, var: Any, before: dict[int, Any]) -> bool:
        """Make a shared operand inside that is a constant, or a transpose, which the compiler makes part of the product."""
        eqn = self._makers.get(var)
        if eqn is None or not (self._is_constant(var) or primitive_name(eqn) in _TRANSPOSES):
            return False
        self._operands[id(eqn)] = [shared(shape_of(atom)) for atom in eqn.invars]
        before[id(eqn)] = eqn
        if not is_literal(eqn.invars[0]):
            self._absorb_view(eqn.invars[0], before)
        return True


def program_states(program: Program, states: Sequence[State], length: int) -> dict[Any, State]:
    """The states of all variables of a program, for those of its inputs. Raises Mixed."""
    walk = WalkOfStates(length, True, apply_rule)
    env: dict[Any, State] = {var: shared(shape_of(var)) for var in program.constvars}
    env |= zip(program.invars, states, strict=True)
    for eqn in program.eqns:
        operands = [shared(shape_of(atom)) if is_literal(atom) else env[atom] for atom in eqn.invars]
        env |= zip(eqn.outvars, apply_rule(walk, eqn, operands), strict=True)
    return env
