"""Derivatives inside of a derivative: forces in a loss, a penalty on gradients.

The forward pass of the outer derivative has both passes of the inner one in it. What the inner forward pass keeps is read by the
inner backward pass, past all places where the forward pass could be cut: it would have to be kept whatever a plan does. So
the inner derivative is planned first, for the least memory: its backward pass computes again, stretch by stretch, what it
reads. What is left between these stretches is small, and the outer derivative is planned as any other.

In the outer backward pass the inner one comes first. What it finds are cotangents of what the inner passes hand from one to the
other: of every residual of a layer. They wait for the turn of the inner forward pass. As all is linear in cotangents, these are
followed at once as far as no product is needed, where few arrays are left to wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from memjax._core.barriers import barrier
from memjax._core.compat import derivatives, name_stack
from memjax._core.program.costs import Device
from memjax._core.program.dataflow import is_literal, made_by, read_by, renamed, variables
from memjax._core.program.jaxpr import trace
from memjax._core.program.primitives import expensive
from memjax._jit.derivatives.passes import StepPasses, passes_of
from memjax._plan.run import Run
from memjax._plan.solve.chain import Chain

_SUM = "add_any"
# Linear in their only operand that is a cotangent. Rules of custom derivatives can have others in a backward pass.
_LINEAR = {"broadcast_in_dim", "convert_element_type", "copy", "div", "expand_dims", "mul", "neg"}
_LINEAR |= {"reduce_sum", "reshape", "rev", "slice", "squeeze", "transpose"}


def has_inner(passes: StepPasses) -> bool:
    """Whether the forward pass contains another derivative."""
    return any("transpose" in derivatives(name_stack(eqn)) for eqn in passes.forward.eqns)


def computed_again(passes: StepPasses, rates: Device) -> bool:
    """Rewrites `passes` so that inner backward passes recompute the residuals that they read.

    An inner derivative that contains a loop is left as it is, and so is one whose plan of least memory is a single
    stretch.

    Returns:
      whether anything changed.
    """
    forward = passes.forward
    marks = [derivatives(name_stack(eqn))[1:] for eqn in forward.eqns]
    stages, inner = passes_of(forward.flow, marks, passes.outputs, passes.axes)
    parts, backward, changed = list[list[Any]](), passes.backward.eqns, False
    for stage, numbers in enumerate(stages):
        one = inner.get(stage)
        chain = None if one is None else Chain(one, rates)
        if one is None or chain is None or chain.loops or len(choices := chain.least_choices()) == 1:
            parts.append([forward.eqns[i] for i in numbers])
            continue
        again = _Again(Run(chain, choices), passes.axes)
        backward = _Outer(again, passes.backward.outvars).of(backward)
        parts.append(again.eqns)
        changed = True
    if changed:
        passes.replace_equations(list(itertools.chain(*parts)), backward)
    return changed


class _Again:
    """Writes out the forward and backward pass of a plan without loops and codes as equations.

    Args:
      run: the plan.
      axes: sizes of the named axes in scope.

    Attributes:
      turns: for each variable of the backward pass, the index of the stretch whose backward pass computes it.
    """

    def __init__(self, run: Run, axes: Mapping[str, int]):
        self._forward = run.derivative.forward
        self._copies: list[dict[Any, Any]] = []  # of each turn: copies by variable
        self._again: list[list[Any]] = []  # what makes them
        self._backward: list[list[Any]] = []
        self.turns: dict[Any, int] = {}
        self._known = known = {*run.kept, *self._forward.invars}
        names: dict[Any, Any] = {}  # of what backward passes make, after a barrier
        for number, turn in enumerate(run.turns):
            mine = read_by(turn.backward)
            here: dict[Any, Any] = {}
            self._copies.append(here)
            self._again.append([])
            if turn.again:
                leaves = [var for var in read_by(turn.again) if var in known]
                waiting = [var for var in mine if var in self.turns]
                passed, self._again[-1] = _passed([*renamed(waiting, names), *leaves], axes)
                names |= zip(waiting, passed, strict=False)
                here |= zip(leaves, passed[len(waiting) :], strict=True)
                self._copy(turn.again, number)
            self._backward.append([eqn.replace(invars=renamed(eqn.invars, here | names)) for eqn in turn.backward])
            self.turns |= dict.fromkeys(made_by(turn.backward), number)

    @property
    def eqns(self) -> list[Any]:
        """The equations of both passes, in an order in which they can run."""
        both = itertools.chain(*itertools.zip_longest(self._again, self._backward))
        return [*self._forward.eqns, *itertools.chain(*both)]

    def turns_of(self, var: Any) -> set[int]:
        """The indices of the backward stretches that already hold their own copy of `var`.

        A copy is recomputed, or passed through a barrier.
        """
        return {number for number, here in enumerate(self._copies) if here.get(var, var) is not var}

    def copy(self, var: Any, turn: int) -> Any | None:
        """The copy of `var` in the backward stretch `turn`, recomputed if need be, or `var` itself if it is kept or an input.

        None if recomputing it would take a product or an effect.
        """
        here = self._copies[turn]
        if var not in here:
            eqns = self._forward.flow.needed([var], here.keys() | self._known)
            if any(expensive(eqn) or eqn.effects for eqn in eqns):
                return None
            self._copy(eqns, turn)
        return here.get(var, var)

    def _copy(self, eqns: Sequence[Any], turn: int) -> None:
        here = self._copies[turn]
        for eqn in eqns:
            copied = eqn.replace(invars=renamed(eqn.invars, here), outvars=[core.Var(var.aval) for var in eqn.outvars])
            self._again[turn].append(copied)
            here |= {var: out for var, out in zip(eqn.outvars, copied.outvars, strict=True) if var not in here}


def _passed(atoms: Sequence[Any], axes: Mapping[str, int]) -> tuple[list[Any], list[Any]]:
    """Passes variables through a barrier; returns the new variables and the barrier's equations."""
    jaxpr = trace(lambda *values: barrier(list(values)), [var.aval for var in atoms], dict(axes)).jaxpr
    names = dict(zip(jaxpr.invars, atoms, strict=True)) | {out: core.Var(out.aval) for out in made_by(jaxpr.eqns)}
    replaced = lambda eqn: eqn.replace(invars=renamed(eqn.invars, names), outvars=renamed(eqn.outvars, names))
    return renamed(jaxpr.outvars, names), list(map(replaced, jaxpr.eqns))


def _divides_by(eqn: Any, var: Any) -> bool:
    return eqn.primitive.name == "div" and eqn.invars[1] is var


class _Outer:
    """Rewrites the outer backward pass so that the backward pass of each inner backward pass reads recomputed copies.

    So do the linear equations that propagate its cotangents, as far as the copies take no product. A cotangent with contributions
    from this part and from the rest is kept as two variables until their sum is needed.
    """

    def __init__(self, again: _Again, results: Sequence[Any]):
        self._again, self._results = again, variables(results)
        self._found: list[Any] = []
        # A cotangent is early if it follows from an inner backward pass alone. By cotangent, the turn of that pass.
        self._early: dict[Any, int] = {}
        self._parts: dict[Any, tuple[Any, Any]] = {}  # by cotangent, its early part and the rest
        self._sum: Any = None

    def of(self, eqns: Sequence[Any]) -> list[Any]:
        """Rewrites the equations of the pass."""
        cotangents = made_by(eqns)
        for eqn in eqns:
            marks = derivatives(name_stack(eqn))
            if marks[2:3] == ["transpose"]:
                self._add_of_inner_backward(eqn)
            elif marks[:1] != ["transpose"]:  # what uses gradients, such as an update: it need not be linear
                self._whole(variables(eqn.invars))
                self._found.append(eqn)
            elif not any(var in self._early or var in self._parts for var in variables(eqn.invars)):
                self._found.append(eqn)
            elif eqn.primitive.name == _SUM:
                self._add_sum(eqn)
            else:
                self._add(eqn, [var for var in variables(eqn.invars) if var in cotangents])
        self._whole(self._results)
        return self._found

    def _add_of_inner_backward(self, eqn: Any) -> None:
        """Adds an equation that reads copies from one stretch: one that holds copies of all these operands, if there is one."""
        again, reads = self._again, variables(eqn.invars)
        self._whole(reads)
        of_turn = [turns for var in reads if (turns := again.turns_of(var))]
        names: dict[Any, Any] = {}
        made_in = [self._early[var] for var in reads if var in self._early]
        if of_turn:
            common = set.intersection(*of_turn) or set.union(*of_turn)
            turn = min(common.intersection(made_in) or common)
            names = {var: again.copy(var, turn) for var in reads if turn in again.turns_of(var)}
            made_in.append(turn)
        self._found.append(eqn.replace(invars=renamed(eqn.invars, names)))
        made_in = made_in or [again.turns[var] for var in reads if var in again.turns]
        if made_in:
            self._early |= dict.fromkeys(eqn.outvars, min(made_in))

    def _add_sum(self, eqn: Any) -> None:
        self._sum, [out] = eqn, eqn.outvars
        early, late = list[Any](), list[Any]()
        for atom in eqn.invars:
            if not is_literal(atom) and atom in self._parts:
                first, second = self._parts[atom]
                early.append(first)
                late.append(second)
            else:
                (late if is_literal(atom) or atom not in self._early else early).append(atom)
        turn = min(self._early[var] for var in early)
        if not late:
            self._found.append(eqn)
            self._early[out] = turn
            return
        sums = []
        for parts in (early, late):
            if len(parts) == 2:
                made = core.Var(out.aval)
                self._found.append(eqn.replace(invars=parts, outvars=[made]))
                parts = [made]
            sums += parts
        self._early[sums[0]] = turn
        self._parts[out] = sums[0], sums[1]

    def _add(self, eqn: Any, cotangents: Sequence[Any]) -> None:
        """Adds an equation that reads a cotangent computed from an inner backward pass."""
        copies = self._copies(eqn, cotangents)
        if copies is None or len(eqn.outvars) != 1:
            self._whole(cotangents)
            self._found.append(eqn)
            return
        [var], [out], turn = cotangents, eqn.outvars, self._turn(cotangents[0])
        if var in self._early:
            self._found.append(eqn.replace(invars=renamed(eqn.invars, copies)))
            self._early[out] = turn
            return
        first, second = self._parts[var]
        early, late = core.Var(out.aval), core.Var(out.aval)
        self._found.append(eqn.replace(invars=renamed(eqn.invars, copies | {var: first}), outvars=[early]))
        self._found.append(eqn.replace(invars=renamed(eqn.invars, {var: second}), outvars=[late]))
        self._early[early] = turn
        self._parts[out] = early, late

    def _turn(self, var: Any) -> int:
        return self._early[var if var in self._early else self._parts[var][0]]

    def _copies(self, eqn: Any, cotangents: Sequence[Any]) -> dict[Any, Any] | None:
        """The copies that an equation can read at once; None: it has to wait."""
        if len(cotangents) != 1 or eqn.primitive.name not in _LINEAR or _divides_by(eqn, cotangents[0]):
            return None
        turn = self._turn(cotangents[0])
        found = {var: self._again.copy(var, turn) for var in variables(eqn.invars) if var not in cotangents}
        return None if any(copy is None for copy in found.values()) else found

    def _whole(self, cotangents: Sequence[Any]) -> None:
        """Adds the equations that sum the parts of these cotangents."""
        for var in cotangents:
            if (parts := self._parts.pop(var, None)) is not None:
                self._found.append(self._sum.replace(invars=list(parts), outvars=[var]))
