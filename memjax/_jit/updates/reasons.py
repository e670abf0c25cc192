"""Why stacked gradients are kept until the backward pass is over: for people, in a sentence each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from memjax._core.check import readable_bytes
from memjax._core.compat import is_backward, name_stack, primitive_name
from memjax._core.program.dataflow import Walk, variables
from memjax._core.program.jaxpr import Program, nbytes
from memjax._core.program.scopes import place_of
from memjax._jit.updates.found import Growth, Update
from memjax._jit.updates.loops import backward_loops, gradients_of


def reasons(
    program: Program, found: Sequence[Update], failed: Collection[int], donated: Mapping[Any, Any], platform: str
) -> list[str]:
    """What keeps the stacked gradients of loops whose updates are not found, those that `failed` left out, and what to change."""
    moved = {id(one.loop): one for one in found}
    notes = []
    for loop in backward_loops(program):
        if id(loop) in failed:
            continue
        growth = Growth(program, loop, donated, platform)
        if id(loop) in moved:
            notes.append(_not_known(set(kept_by(program, growth, loop)).difference(moved[id(loop)].gradients)))
        else:
            kept = kept_by(program, growth, loop)
            notes.append(_mixed(program, growth, loop) or _not_donated(growth, loop) or _not_known(kept))
    return [*(note for note in notes if note), *_of_picked(program)]


def kept_by(program: Program, growth: Growth, loop: Any) -> list[Any]:
    """The gradients of a loop that are stacked for an update after it."""
    updated = {var for i in growth.following for var in program.flow.reads[i]}
    return [var for var in loop.outvars if var in updated and var not in program.outvars]


def _mixed(program: Program, growth: Growth, loop: Any) -> str | None:
    """What reads all gradients at once, before or beside an update of them."""
    kept = kept_by(program, growth, loop)
    following, depending = set(growth.following), program.flow.depending(kept)
    for i, eqn in enumerate(program.eqns):
        if kept and i not in following and not depending.isdisjoint(program.flow.reads[i]):
            place = place_of(eqn)
            what = primitive_name(eqn) + (f" at {place}" if place else "")
            return f"keeps {_size(kept)} of gradients: {what} reads those of all turns"
    return None


def _not_donated(growth: Growth, loop: Any) -> str | None:
    makes = growth.would_make()
    if not makes:
        return None
    return (
        f"keeps {_size(gradients_of(loop))} of gradients: their update makes {_size(makes)} that are no donated arguments: "
        "donate weights and state (donate_argnums)"
    )


def _not_known(kept: Collection[Any]) -> str | None:
    if not kept:
        return None
    return f"keeps {_size(kept)} of gradients: their update is not known to run for one turn of a loop"


def _of_picked(program: Program) -> list[str]:
    """A note on layers that are picked by index from stacked weights. The gradient of each is a whole stack, mostly zeros."""
    makers, inner = program.flow.makers, set[Any]()
    sums = [eqn for eqn in program.eqns if primitive_name(eqn) == "add_any" and is_backward(name_stack(eqn))]
    for eqn in sums:
        inner.update(variables(eqn.invars))
    kept, picked = [], set[Any]()
    for eqn in sums:
        (out,) = eqn.outvars
        parts = [] if out in inner else _parts(out, makers)
        if len(parts) > 1:
            kept.append(out)
            picked.update(place_of(one) for one in parts)
    if not kept:
        return []
    place = min(picked)
    return [
        f"keeps {_size(kept)} of gradients: layers are picked by index from stacked weights{place and ' at ' + place}: "
        "run them by jax.lax.scan, or give each its own arrays"
    ]


def _parts(out: Any, makers: Mapping[Any, Any]) -> list[Any]:
    """The equations whose results are added up to `out`; none if one of them does not place a part in a stack of zeros."""
    found, walk = [], Walk([out])
    for var in walk:
        eqn = makers.get(var)
        if eqn is not None and primitive_name(eqn) == "add_any":
            walk.add(eqn.invars)
        elif eqn is not None and eqn.primitive.name == "pad" and eqn.params["padding_config"][0] != (0, 0, 0):
            found.append(eqn)
        else:
            return []
    return found


def _size(some: Iterable[Any]) -> str:
    return readable_bytes(sum(nbytes(var.aval) for var in some))
