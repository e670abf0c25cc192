"""A plan as a policy of `jax.checkpoint` by names, where it is one. `Plan` imports this."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from memjax._core.program.name_policy import NamePolicy

_SHOWN = 5


def policy_of(plan: Any) -> NamePolicy:
    """The policy with which `jax.checkpoint` keeps what the plan keeps; see `Plan.as_policy`."""
    if reason := next(_reasons(plan), None):
        raise ValueError(f"plan must be one that names of arrays can say, got one {reason}")
    names = lambda on_host: frozenset(one.name for one in _to_name(plan) if one.name and one.on_host == on_host)
    return NamePolicy(names(False), names(True))


def _reasons(plan: Any) -> Iterator[str]:
    """Why the plan is no policy, and what to do."""
    stretches = plan.stretches
    use = "use memjax.planned(f, plan=plan)"
    if plan.tiled:
        yield f"with parts that run tile by tile, which no policy does: {use}, or plan without 'tile' in allow"
    if not stretches:
        yield "that computes nothing again: leave jax.checkpoint out"
    bits = {one.bits for stretch in stretches for one in stretch.kept}
    if bits == {1, None} or bits == {1}:
        yield f"with masks as bits, which no policy makes: {use}"
    if bits - {None}:
        yield f"with arrays in codes, which no policy makes: {use}, or plan without 'compress' in allow"
    if any(stretch.in_blocks is not None for stretch in stretches):
        yield f"with a schedule: turns of a loop run again in blocks, which no policy does: {use}, or plan for more bytes"
    if any(first[:2] == second[:2] for first, second in itertools.pairwise(stretches)):
        yield f"in which some turns of a loop keep other arrays than the rest: {use}, or plan for another budget"
    if plan.in_steps:
        yield f"whose backward pass makes large arrays one after another, which no policy does: {use}, or plan for more bytes"
    if unnamed := [one.what for one in _to_name(plan) if one.name is None]:
        listed = "; ".join(list(dict.fromkeys(unnamed))[:_SHOWN])
        more = len(dict.fromkeys(unnamed)) - _SHOWN
        yield (
            f"that keeps arrays without a name ({listed}{f'; and {more} more' if more > 0 else ''}): name them, "
            "x = jax.ad_checkpoint.checkpoint_name(x, 'a name'), and plan again"
        )
    names = {one.name for one in _to_name(plan) if one.name}
    if both := sorted(name for name in names if any(name in stretch.not_kept for stretch in stretches)):
        yield f"that keeps some arrays of the name {both[0]!r} and not others: give these another name, and plan again"


def _to_name(plan: Any) -> list[Any]:
    """What is kept only if a policy says so: no inputs of a loop's body, nor what enters or leaves a loop."""
    found = []
    for stretch, later in zip(plan.stretches, [*plan.stretches[1:], None], strict=True):
        found += [one for one in stretch.kept if one.equation >= 0]
        if later is not None and _is_straight(stretch) and _is_straight(later):
            found += stretch.crossing
    return found


def _is_straight(stretch: Any) -> bool:
    return stretch.turns is None
