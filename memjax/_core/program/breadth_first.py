"""The order in which XLA:CPU runs a program.

By default an instruction runs as soon as its operands are there, in breadth first order (XLA's `BFScheduler`): first all that
depends on arguments and constants alone, then all that depends on these results, and so on. So the random bits and the zeros of
every layer are made before the first layer has run, and what no barrier holds back is computed again long before it is needed.
An instruction's level is the number of instructions on the longest path to it. XLA for GPUs orders programs otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memjax._core.program.costs import stored
from memjax._core.program.cpu_lowering import lowered
from memjax._core.program.dataflow import Dataflow, is_literal, renamed, variables
from memjax._core.program.library_kernels import with_written
from memjax._core.program.primitives import ALIASES, BARRIER, CALLS, CALLS_OF_ONE_BODY, LOOPS, SOURCES

# Equal ones of these stay: for each scatter, say, XLA copies the zeros that it writes over.
_NOT_SHARED = LOOPS | CALLS | CALLS_OF_ONE_BODY | SOURCES | {BARRIER}
# Instructions that follow each other in one equation: copies and tuples around a loop, which random numbers are made by, too.
_LEVELS = {BARRIER: 3} | dict.fromkeys(("random_bits", "random_fold_in", "random_split", "scan", "while"), 5)


def breadth_first(flow: Dataflow, outputs: Iterable[Any]) -> Dataflow:
    """The equations by level, each once where several are equal, as XLA has it.

    One whose result is not written to memory is computed where that is read: it adds no level.
    """
    outputs = list(outputs)
    flow = with_written(Dataflow(lowered(_once(flow.eqns, set(variables(outputs))))), outputs)
    written = stored(flow, [*outputs, *flow.outside], "cpu")
    level: dict[Any, int] = {}
    levels = []
    for eqn, reads in zip(flow.eqns, flow.reads, strict=True):
        name = eqn.primitive.name
        found = max((level.get(var, 0) for var in reads), default=0)
        if name == BARRIER or (name not in ALIASES and not written.isdisjoint(eqn.outvars)):
            found += _LEVELS.get(name, 1)
        level |= dict.fromkeys(eqn.outvars, found)
        levels.append(found)
    return flow.reordered(sorted(range(len(levels)), key=levels.__getitem__))


def _once(eqns: Iterable[Any], outputs: set[Any]) -> list[Any]:
    """The equations, without those that make again what an earlier one has made. What makes an output stays."""
    first: dict[Any, list[Any]] = {}
    names: dict[Any, Any] = {}
    found = []
    for eqn in eqns:
        if not names.keys().isdisjoint(variables(eqn.invars)):
            eqn = eqn.replace(invars=renamed(eqn.invars, names))
        one = None if eqn.effects or eqn.primitive.name in _NOT_SHARED else _what(eqn)
        if one in first and outputs.isdisjoint(eqn.outvars):
            names |= zip(eqn.outvars, first[one], strict=True)
            continue
        if one is not None:
            first.setdefault(one, eqn.outvars)
        found.append(eqn)
    return found


def _what(eqn: Any) -> Any:
    """Equal for equations that make the same; None if that is not known."""
    value = lambda atom: (atom.aval, atom.val.item() if hasattr(atom.val, "item") else atom.val)
    try:
        atoms = [value(atom) if is_literal(atom) else atom for atom in eqn.invars]
        one = (eqn.primitive.name, *sorted(eqn.params.items()), *atoms)
        hash(one)
    except (TypeError, ValueError):  # what cannot be hashed, and literals that are arrays
        return None
    return one
