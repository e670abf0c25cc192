"""Refusing functions that mix positions of tiles, or heads of groups: a part is to be computed as it is among all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from memjax._core.check import shown
from memjax._core.compat import bodies, is_tracer, parameters, primitive_name
from memjax._core.positions.rules import apply_rule
from memjax._core.positions.walk import UNKNOWN, Mixed, Positions, Seen, State, Summed, Walk, reason
from memjax._core.program.dataflow import is_literal
from memjax._core.tiles import with_size

_MOST_COMPARED = 4096  # elements of a constant
_OF_SHAPES = {"shape", "new_sizes", "slice_sizes", "limit_indices", "sizes", "sharding", "out_sharding", "name"}
"""Parameters that may differ with the number of positions: what they say is seen in the shapes of results, too."""
_SIMPLE = bool | int | float | complex | str | np.dtype | None


def refuse_mixed_positions(
    f: Callable[..., Any],
    traced: Callable[[int], Any],
    out_axes: Sequence[int | None],
    tile: int,
    length: int,
) -> None:
    """Raises ValueError if `f` mixes positions. `traced` gives its program for a number of positions."""
    lengths = (tile, length) if 1 < tile < length else (max(length, 2), 2 * max(length, 2))
    name = getattr(f, "__qualname__", None) or repr(f)
    try:
        programs = list(map(traced, lengths))
        seen = [program.check_results(out_axes) for program in programs]
        _check_equal([program.closed for program in programs], seen)
    except Mixed as reason:
        raise ValueError(
            f"f must not mix positions, got {name}, in which {reason}. Take that part out of it; if it is exact tile by tile "
            "all the same, use check=False"
        ) from None


def check_result(index: int, state: State, axis: int | None) -> None:
    if axis is None:
        if not isinstance(state, Summed):
            what = (
                "has positions"
                if isinstance(state, Positions)
                else "does not depend on positions: tiles would add it again"
            )
            raise Mixed(f"result {index}, which is to be added up (out_axes=None), {what}")
    elif isinstance(state, Summed):
        raise Mixed(f"result {index} is a sum over positions, which needs out_axes=None")
    elif isinstance(state, Positions):
        if state != Positions(axis, 1):
            raise Mixed(f"result {index} has its positions in dimension {state.dim}, not {axis}")
    elif state.uneven[axis]:
        raise Mixed(f"result {index} differs from position to position but does not depend on the mapped arguments")


def refuse_mixed_heads(name: str, f: Callable[..., Any], arrays: Sequence[Any], given: Any = None) -> None:
    """Raises ValueError if `f` mixes heads, or does what depends on how many or on which of them it is given.

    Heads take the place of the positions that `tiled` checks. What cannot be judged is taken for right: kernels, and functions of
    a number of heads of their own.

    Args:
      name: of the argument that `f` is.
      f: of queries, keys and values, say.
      arrays: the types of these for one group.
      given: what the user gave for `f`; None: `f` itself.
    """
    per_head = [one.shape[2] // arrays[-1].shape[2] for one in arrays]  # of the last, keys and values
    states = [Positions(2, inner) for inner in per_head]
    least = max(arrays[-1].shape[2], 2)
    programs, seen = [], []
    try:
        for heads in (least, 2 * least):
            sizes = [heads * inner for inner in per_head]
            types = [one.update(shape=with_size(one.shape, 2, size)) for one, size in zip(arrays, sizes, strict=True)]
            programs.append(jax.make_jaxpr(f)(*types))
    except (TypeError, ValueError, IndexError, AssertionError):
        return
    try:
        for program, heads in zip(programs, (least, 2 * least), strict=True):
            seen.append(Seen())
            if Walk(heads, False, apply_rule, seen[-1]).program(program.jaxpr, states) != states[:1]:
                raise Mixed("the heads of the result are not those of the first argument")
        _check_equal(programs, seen)
    except Mixed as mixed:
        if UNKNOWN in mixed.what:
            return
        said = mixed.what.partition(": ")[0].replace("position", "head") + (
            f", at {mixed.where}" if mixed.where else ""
        )
        raise ValueError(
            f"{name} must treat heads apart and alike, got {shown(given or f)}, in which {said}: pass groups=1, which takes all "
            "heads at once"
        ) from None


# Whether two programs, traced for different numbers of positions, are equal but for shapes


def _check_equal(programs: Sequence[Any], seen: Sequence[Seen]) -> None:
    """Raises Mixed unless they are, and so is what walks through them have seen."""
    (first, second), (one_seen, other_seen) = programs, seen
    _check_same(first.jaxpr, second.jaxpr)
    for eqn, other in zip(one_seen.made, other_seen.made, strict=True):
        # What a gather reads from is in its result whole or not at all; where it reads, once for each result.
        count = 1 if primitive_name(eqn) == "gather" else len(eqn.invars)
        if any(a.aval.shape != b.aval.shape for a, b in list(zip(eqn.invars, other.invars, strict=True))[:count]):
            shapes = ", ".join(str(atom.aval.shape) for atom in eqn.invars)
            what = f"makes from what is as long as the positions ({shapes}) a value that depends on their number"
            raise reason(eqn, what)
    for one, two in zip(one_seen.backward, other_seen.backward, strict=True):
        _check_same(one, two)
    for one, two in zip(first.consts, second.consts, strict=False):
        if one is two or is_tracer(one) or is_tracer(two) or np.shape(one) != np.shape(two):
            continue
        if np.size(one) <= _MOST_COMPARED and not _equal(one, two):
            raise Mixed(f"a constant of shape {np.shape(one)} depends on the number of positions")


def _check_same(first: Any, second: Any) -> None:
    """Raises Mixed unless the programs have the same equations and numbers."""
    if [primitive_name(eqn) for eqn in first.eqns] != [primitive_name(eqn) for eqn in second.eqns]:
        raise Mixed("the program itself depends on the number of positions")
    for eqn, other in zip(first.eqns, second.eqns, strict=True):
        for one, two in zip(map(_number, eqn.invars), map(_number, other.invars), strict=True):
            if not _equal(one, two):
                raise reason(
                    eqn,
                    f"has the number of positions among its operands ({one} for one length, {two} for another): a mean over "
                    "positions, say, which tiles cannot take: sum here, and divide afterwards",
                )
        mine, others = parameters(eqn), parameters(other)
        for name in mine.keys() & others.keys() - _OF_SHAPES:
            if _is_simple(mine[name]) and _is_simple(others[name]) and repr(mine[name]) != repr(others[name]):
                values = f"({name} is {mine[name]} for one, {others[name]} for another)"
                raise reason(eqn, f"depends on the number of positions {values}")
        inside, counterparts = bodies(eqn), bodies(other)
        if len(inside) != len(counterparts):
            raise reason(eqn, "depends on the number of positions")
        for body, counterpart in zip(inside, counterparts, strict=True):
            _check_same(body, counterpart)


def _is_simple(value: Any) -> bool:
    return all(map(_is_simple, value)) if isinstance(value, tuple) else isinstance(value, _SIMPLE)


def _number(atom: Any) -> Any:
    return atom.val if is_literal(atom) else "a variable"


def _equal(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
