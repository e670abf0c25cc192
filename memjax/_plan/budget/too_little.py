"""What to say of a budget that no plan fits."""

from __future__ import annotations

from memjax._core.check import readable_bytes
from memjax._core.compat import source_line
from memjax._plan.layout import Layout
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
    lines = [line for eqn in chain.derivative.forward.eqns[where.start : where.stop] if (line := source_line(eqn))]
    plain = least + layout.local(chain.frontier[-1][0]) - layout.local(chain.frontier[0][0])
    ratio = (chain.base_seconds + chain.frontier[0][1]) / (chain.base_seconds + chain.frontier[-1][1])
    working = layout.local(where.option.working)
    given, possible = readable_bytes(budget), readable_bytes(least)
    if given == possible:  # two digits do not tell them apart
        given, possible = f"{budget:,} B", f"{least:,} B"
    return (
        f"budget is {given}, but the least possible is {possible}, at {ratio:.2f} of the time that "
        f"takes {readable_bytes(plain)}. The backward pass of equations {where.start} to {where.stop} "
        + (f"(from {lines[0]} to {lines[-1]}) " if lines else "")
        + f'holds it up, with {readable_bytes(working)} of its own: give a larger budget, or "min" for the least; '
        "divide the batch, or the sequence with memjax.remat.tiled"
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
