"""Refusing functions that mix positions of tiles, or heads of groups: a part is to be computed as it is among all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from memjax._core.check import shown
from memjax._core.positions.lengths import check_alike, check_same, check_same_constants
from memjax._core.positions.rules import walk
from memjax._core.positions.walk import UNKNOWN, Mixed, Positions, Seen, State, Summed
from memjax._core.tiles import with_size


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
        first, second = map(traced, lengths)
        seen, as_well = (program.check_results(out_axes) for program in (first, second))
        check_same(first.closed.jaxpr, second.closed.jaxpr)
        check_alike(seen, as_well)
        check_same_constants(first.closed.consts, second.closed.consts)
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
            if walk(program.jaxpr, states, heads, False, seen[-1]) != states[:1]:
                raise Mixed("the heads of the result are not those of the first argument")
        first, second = programs
        check_same(first.jaxpr, second.jaxpr)
        check_alike(*seen)
        check_same_constants(first.consts, second.consts)
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
