"""The examples of a batch in a traced step: which values have them, and how much of the step keeps them apart.

Nothing in the step says which argument is the batch. The walk of `memjax._core.positions` follows the first axis of each input
that may be it. Examples may mix in sums alone, of which gradients and mean losses are made. An equation that mixes them otherwise
(a batch norm, a loss that compares examples) ends the part that keeps them apart. A derivative must lie within that part.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from memjax._core.arrays import is_float
from memjax._core.compat import bodies, derivatives, is_backward, makes_two_words, name_stack, scan_counts
from memjax._core.positions.bodies import join, row, stacked
from memjax._core.positions.dimensions import windows
from memjax._core.positions.rules import apply_rule
from memjax._core.positions.walk import (
    UNKNOWN,
    Mixed,
    Positions,
    Shared,
    State,
    Summed,
    Walk,
    Zeros,
    is_zero,
    reason,
    shape_of,
    shared,
)
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import is_literal, made_by, read_by, variables
from memjax._core.program.jaxpr import Program, calls_in_place, without_dead_equations
from memjax._core.program.primitives import (
    CALLS,
    CALLS_OF_ONE_BODY,
    CHECKPOINTS,
    CUSTOM_CALLS,
    LOOPS,
    PLAIN_CALLS,
    TRACED_CUSTOM_CALLS,
    expensive,
    is_attention,
)

# They hold programs, which are not run for fewer examples. Loops and checkpoints are; calls are in place.
_WITH_BODIES = (LOOPS | CALLS | CALLS_OF_ONE_BODY | TRACED_CUSTOM_CALLS | {"custom_linear_solve"}) - {"scan"}
_WITH_BODIES -= CHECKPOINTS | PLAIN_CALLS.keys() | CUSTOM_CALLS.keys()
_MOST_SIZES = 3  # sizes of leading axes that are tried as the number of examples
_MOST_ELEMENTS = 2**32  # of an array of random numbers: they are counted in one word here


_GONE = Shared(())  # of what follows from mixed examples, which is not looked at


@dataclasses.dataclass
class Batch:
    """The part of a step that can run for some examples at a time.

    Attributes:
      length: the number of examples.
      program: the step, with calls in place.
      states: of its variables.
      eqns: of the part, in order.
      reads: what the part reads, whoever makes it.
      makes: what it makes that is read elsewhere.
    """

    length: int
    program: Program
    states: dict[Any, State]
    eqns: list[Any]
    reads: list[Any]
    makes: list[Any]


def batch_of(closed: Any) -> Batch:
    """The part of a traced step that can run in microbatches.

    Raises:
      Mixed: its derivative is not within one. The reason is that for the largest of what may be the batch.
    """
    program = without_dead_equations(calls_in_place(closed, differentiable=False))
    if not any(is_backward(name_stack(eqn)) for eqn in program.eqns):
        raise Mixed("the step has no derivative outside of loops and branches")
    mixed: list[Mixed] = []
    for length, inputs in _sizes(program):
        # What a loss divides by often follows from more than data: from weights of classes, or a scale.
        for others in ((), (*program.constvars, *program.invars)):
            try:
                return _grown(program, length, inputs, others)
            except Mixed as error:
                found = error
        mixed.append(found)
    raise mixed[0] if mixed else Mixed("no argument has a first axis, on which examples would be")


def _sizes(program: Program) -> Iterator[tuple[int, list[Any]]]:
    """What may be the number of examples, and the inputs that have them; the one of which most bytes are inputs first.

    Parameters, and what an optimizer keeps, come out of the step as they go in; data mostly does not.
    """
    outs = collections.Counter(
        (var.aval.shape, var.aval.dtype) for var in program.outvars if hasattr(var.aval, "shape")
    )
    by_size: dict[int, list[Any]] = {}
    for var in program.invars:
        if shape_of(var)[:1] > (1,):
            by_size.setdefault(shape_of(var)[0], []).append(var)
    is_data = lambda var: not (is_float(var.aval) and outs[var.aval.shape, var.aval.dtype])
    data = {size: list(filter(is_data, some)) for size, some in by_size.items()}
    by_bytes = lambda size: (-sum(map(array_bytes, data[size])), -sum(map(array_bytes, by_size[size])))
    for size in sorted(by_size, key=by_bytes)[:_MOST_SIZES]:
        if data[size]:
            yield size, data[size]
        if len(data[size]) < len(by_size[size]):
            yield size, by_size[size]


def _grown(program: Program, length: int, inputs: Sequence[Any], others: Sequence[Any]) -> Batch:
    """What follows from the examples, as far as they are kept apart. Raises `Mixed` if a derivative goes further.

    Args:
      program: the step.
      length: the number of examples.
      inputs: those that have them.
      others: further inputs: what follows without products from these and the examples, a sum over examples for instance, is made
        of the whole batch, before the examples are gone through.
    """
    marks = [derivatives(name_stack(eqn)) for eqn in program.eqns]
    walk = Walk(length, True, rule)
    states: dict[Any, State] = {var: shared(shape_of(var)) for var in (*program.constvars, *program.invars)}
    states |= dict.fromkeys(inputs, Positions(0, 1))
    of_data = {*inputs, *others}  # what follows from these alone, without products
    behind: dict[Any, Mixed] = {}  # what follows from what is not kept apart, by the reason
    inside: list[int] = []
    for i, eqn in enumerate(program.eqns):
        reads = program.flow.reads[i]
        read = [shared(np.shape(atom.val)) if is_literal(atom) else states.get(atom, _GONE) for atom in eqn.invars]
        is_apart = any(isinstance(state, Positions | Summed) for state in read)
        mixed = next((behind[var] for var in reads if var in behind), None)
        outs = None
        if mixed is None:
            try:
                outs = _outs(walk, eqn, read, is_marked=bool(marks[i]))
            except Mixed as error:
                mixed = error
        # How many examples there are, by their mask: known before they are gone through.
        is_of_data = bool(reads or others) and of_data.issuperset(reads) and not expensive(eqn)
        if is_of_data and (outs is None or any(isinstance(state, Summed) for state in outs)):
            states |= ((var, shared(shape_of(var))) for var in eqn.outvars)
            of_data.update(eqn.outvars)
            continue
        if outs is None:
            assert mixed is not None
            if marks[i] and expensive(eqn):
                raise mixed
            behind |= dict.fromkeys(eqn.outvars, mixed)
            continue
        if is_of_data:
            of_data.update(eqn.outvars)
        states |= zip(eqn.outvars, outs, strict=True)
        if is_apart or marks[i] or any(isinstance(state, Positions) for state in outs):
            inside.append(i)
    return _batch(program, length, states, inside, of_data)


def _outs(walk: Walk, eqn: Any, states: list[State], *, is_marked: bool) -> list[State]:
    """The states of what an equation makes; `is_marked`: of a derivative. Raises `Mixed` where examples do not stay apart."""
    if eqn.effects:
        raise reason(eqn, "has effects")
    outs = rule(walk, eqn, states)
    if any(isinstance(state, Summed) for state in states) and not is_marked:
        raise reason(eqn, "reads the sum of all gradients")  # an update does
    return outs


def _batch(program: Program, length: int, states: dict[Any, State], inside: Sequence[int], of_data: set[Any]) -> Batch:
    # What follows from data alone and is read elsewhere, by a sum over a mask for instance, is made there once more: that sum
    # is read here.
    chosen, results = set(inside), set(variables(program.outvars))
    eqns = [program.eqns[i] for i in inside]
    made = made_by(eqns)
    is_read = lambda var: var in results or not chosen.issuperset(program.flow.readers.get(var, ()))
    makes = [var for var in made if isinstance(states[var], Positions | Summed) and is_read(var) and var not in of_data]
    needed = program.flow.reordered(list(inside)).needed(makes)
    if not any(is_backward(name_stack(eqn)) and expensive(eqn) for eqn in needed):
        raise Mixed(
            f"the backward pass cannot run for some of {length} examples at a time (these are looked for on the first axis "
            "of arguments)"
        )
    for var in makes:
        state, maker = states[var], program.flow.makers[var]
        if isinstance(state, Positions) and shape_of(var)[state.dim] != length * state.inner:
            raise reason(maker, UNKNOWN)
        if isinstance(state, Summed) and not is_float(var.aval) and not jnp.issubdtype(var.aval.dtype, jnp.integer):
            raise reason(maker, "sums what is no number")
    eqns = list(needed)
    made = made_by(eqns)
    reads = [var for var in read_by(eqns) if var not in made]
    return Batch(length, program, states, eqns, reads, makes)


def rule(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """The `State` of each output of an equation; raises `Mixed` if the equation mixes examples.

    Operations that `apply_rule` does not cover come first, such as loops and random bits.
    """
    name = eqn.primitive.name
    if name == "random_bits" and isinstance(states[0], Shared):
        shape = shape_of(eqn.outvars[0])
        if shape and shape[0] == walk.length and not shape_of(eqn.invars[0]) and _can_be_cut(eqn):
            return [Positions(0, 1)]
    elif name in _WITH_BODIES and not all(isinstance(state, Shared) for state in states):
        raise reason(eqn, "is not run for some of the examples")
    elif name == "scan" and not all(isinstance(state, Shared) for state in states):
        return _loop(walk, eqn, states)
    elif name == "conv_general_dilated" and all(isinstance(state, Positions) for state in states):
        return _kernel_gradient(eqn, states)
    elif name == "select_and_scatter_add":
        return windows(walk, eqn, states)
    elif is_attention(name) and any(isinstance(state, Positions) for state in states):
        return _attention(walk, eqn, states)
    return apply_rule(walk, eqn, states)


def _kernel_gradient(eqn: Any, states: Sequence[State]) -> list[State]:
    """A convolution that sums over examples, which are the channels that it mixes."""
    numbers = eqn.params["dimension_numbers"]
    apart = [Positions(numbers.lhs_spec[1], 1), Positions(numbers.rhs_spec[1], 1)]
    if list(states) != apart or eqn.params["feature_group_count"] != 1:
        raise reason(eqn, "mixes examples")
    return [Summed()]


def _attention(walk: Walk, eqn: Any, states: Sequence[State]) -> list[State]:
    """A kernel of attention keeps sequences apart, which are the first axis of everything; other operands are empty."""
    first = Positions(0, 1)
    for atom, state in zip(eqn.invars, states, strict=True):
        if state != first and atom.aval.size:
            raise reason(eqn, "has operands that all examples share")
    if any(shape_of(out)[:1] != (walk.length,) for out in eqn.outvars if out.aval.size):
        raise reason(eqn, "mixes examples")
    return [first if out.aval.size else shared(shape_of(out)) for out in eqn.outvars]


def _loop(walk: Walk, eqn: Any, states: list[Any]) -> list[State]:
    """A loop over another axis, layers for instance, whose state may be a sum over examples that begins with zeros."""
    consts, carried = scan_counts(eqn)
    if any(isinstance(state, Positions) and state.dim == 0 for state in states[consts + carried :]):
        raise reason(eqn, "is over positions")
    carry, outs = settled(walk, eqn, states)
    return [*carry, *map(stacked, outs[carried:])]


def settled(walk: Walk, eqn: Any, states: Sequence[Any]) -> tuple[list[State], list[State]]:
    """The states of a loop's carry that an iteration leaves as they are, and of all that an iteration makes."""
    (body,) = bodies(eqn)
    consts, carried = scan_counts(eqn)
    rows = [*map(row, states[consts + carried :])]
    begin = list(zip(eqn.invars, states, strict=True))[consts : consts + carried]
    carry = [
        Zeros(state.uneven) if is_zero(atom, state) and isinstance(state, Shared) else state for atom, state in begin
    ]
    for _ in range(len(carry) + 2):
        outs = walk.program(body, [*states[:consts], *carry, *rows])
        new = [
            after if isinstance(before, Zeros) and isinstance(after, Summed) else _still(eqn, before, after)
            for before, after in zip(carry, outs[:carried], strict=True)
        ]
        if new == carry:
            return carry, outs
        carry = new
    raise reason(eqn, "is not known to keep positions apart")


def _still(eqn: Any, before: State, after: State) -> State:
    found = join(eqn, before, after)
    is_still_zero = isinstance(before, Zeros) and isinstance(after, Zeros)
    return Shared(found.uneven) if isinstance(found, Shared) and not is_still_zero else found


def _can_be_cut(eqn: Any) -> bool:
    """Whether each random number is that of its place alone, so that some of them can be made without the others."""
    if math.prod(shape_of(eqn.outvars[0])) >= _MOST_ELEMENTS:
        return False
    with eqn.ctx.manager:
        return makes_two_words(eqn.invars[0].aval.dtype)
