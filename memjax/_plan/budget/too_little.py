"""What to say of a budget that no plan fits."""

from __future__ import annotations

from memjax._core.check import readable_bytes
from memjax._core.program.scopes import place_of
from memjax._plan.memory.layout import Layout
from memjax._plan.solve.chain import Chain

_WORTH_A_WORD = 0.95  # of the least bytes without: so many, or fewer


def too_little(chain: Chain, budget: int, least: int, layout: Layout) -> str:
    """The least possible bytes, the time there, and what holds it up."""
    choices = chain.least_choices()
    held = 0
    top, where = 0, choices[0]
    for choice in choices:
        if held + choice.option.working > top:
            top, where = held + choice.option.working, choice
        held += choice.option.nbytes
    places = [place for eqn in chain.derivative.forward.eqns[where.start : where.stop] if (place := place_of(eqn))]
    plain = least + layout.local(chain.frontier[-1][0]) - layout.local(chain.frontier[0][0])
    ratio = (chain.base_seconds + chain.frontier[0][1]) / (chain.base_seconds + chain.frontier[-1][1])
    working = (
        min(1.0, where.option.working / max(top, 1)) * least
    )  # predicted bytes are off, those of the least are compiled
    several = len(set(places)) > 1
    found = (f"(from {places[0]} to {places[-1]}) " if several else f"(at {places[0]}) ") if places else ""
    turns = [pair.forward.params["length"] for pair in chain.loops.values() if pair.early is None]
    hints = [] if where.start in chain.loops else ["; divide the batch, or the sequence with memjax.remat.tiled"]
    if turns:
        hints.append(
            f"; of a jax.lax.scan over time ({max(turns)} turns here) memjax.remat.scan(..., budget=) keeps less"
        )
    given, possible = readable_bytes(budget), readable_bytes(least, up=True)
    if given == readable_bytes(least):  # two digits do not tell them apart
        given, possible = f"{budget:,} B", f"{least:,} B"
    return (
        f"budget is {given}, but the least possible is {possible}, at {ratio:.2f} of the time that "
        f"takes {readable_bytes(plain)}. The backward pass of equations {where.start} to {where.stop} "
        + f'{found}holds it up, with about {readable_bytes(working)} of that: give a larger budget, or "min" for the least'
        + "".join(hints)
        + (f". This holds if {layout.assumes}: plan ahead for other shardings" if layout.assumes else "")
    )


def what_moving_saves(chain: Chain, moved: Chain, layout: Layout) -> str:
    """What to say of "offload" where it is not allowed: `moved` is the chain with it."""
    least, otherwise = layout.local(moved.frontier[0][0]), layout.local(chain.frontier[0][0])
    if least > _WORTH_A_WORD * otherwise:
        return ""
    return (
        f'; with "offload" in allow the least is about {readable_bytes(least)} by the model that has {readable_bytes(otherwise)} '
        "without: what loops keep lies on the host then"
    )
