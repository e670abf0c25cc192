"""Where a program can be cut into pieces, and which part of the backward pass belongs to each.

A piece ends where few bytes are alive: between the blocks of a network, and inside them where a residual stream is all that
there is. Between two cuts there is something worth keeping, a product at least. What depends on no input, and other names
for inputs, can be had anywhere and counts as alive nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from memjax._core.compat import is_ordered
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import made_by, read_by, variables
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import VIEWS, expensive

_MOST_PIECES = 640
_MANY_MORE = 4  # times the new bytes alive at a cut: if so many are alive later, the cut is worth making
_GATHERS = frozenset(("reshard", "sharding_constraint"))
_MOVES = VIEWS | _GATHERS


def available_anywhere(program: Program, free: Iterable[Any]) -> set[Any]:
    """What is there again in the backward pass, or follows from that by moving it, or from constants cheaply.

    Parameters that are gathered where a block begins are: each part of the block gathers what it reads.
    """
    flow = program.flow
    constant = flow.following((), lambda eqn: not expensive(eqn))
    return flow.following({*free, *program.constvars, *constant}, lambda eqn: eqn.primitive.name in _MOVES)


def gathered(program: Program, free: set[Any]) -> set[Any]:
    """What a device has more of than of the inputs that it follows from, while it is read."""
    return made_by(eqn for eqn in program.eqns if eqn.primitive.name in _GATHERS).keys() & free


def cut_points(program: Program, outputs: Sequence[Any], free: set[Any], alone: Sequence[Any] = ()) -> list[int]:
    """Numbers of equations before which the program is cut, 0 and the number of all included.

    Args:
      program: the forward pass; what leads to residuals only does not keep anything alive.
      outputs: of it, without residuals.
      free: what counts as alive nowhere.
      alone: equations that are a piece each.
    """
    eqns, flow = program.eqns, program.flow
    primal = {id(eqn) for eqn in flow.needed(outputs, always=flow.acting)}
    made = {out: i for out, i in flow.place.items() if out not in flow.names and out not in free}
    last: dict[Any, int] = {}
    for i, roots in enumerate(flow.roots):
        if id(eqns[i]) in primal:
            last |= dict.fromkeys(roots.intersection(made), i)
    alive = _alive(last, made, last, len(eqns))

    heavy = [
        i for i, eqn in enumerate(eqns) if id(eqn) in primal and expensive(eqn) and not free.issuperset(eqn.outvars)
    ]
    # The latest of the places with the fewest bytes: what is added to a residual stream belongs to what made it.
    gaps = [min(range(other, one, -1), key=alive.__getitem__) for one, other in pairwise(heavy)]
    if heavy:  # what follows the last of them, a loss, is a piece, too
        tail = next((p for p in range(heavy[-1] + 1, len(eqns)) if alive[p] <= alive[p + 1]), len(eqns))
        gaps += [tail] if tail < len(eqns) else []
    live = [{var for var, end in last.items() if made[var] < gap <= end} for gap in gaps]
    chosen: list[int] = []
    inside: set[int] = set()  # of these, places with fewer bytes beside them: inside of a layer
    for k, gap in enumerate(gaps):
        around = [alive[gaps[j]] for j in (k - 1, k + 1) if 0 <= j < len(gaps)]
        through = set.intersection(*(live[j] for j in (k - 1, k, k + 1) if 0 <= j < len(gaps)))
        is_least = all(alive[gap] <= other for other in around)
        if is_least or len(live[k] - through) == 1:
            # Of places with as few bytes one where less than half is new since the last cut, if there is one: what crosses that
            # is kept already. The parts of a growing concatenation cross there; an array made of all of them does not.
            new = _alive(made_by(eqns[chosen[-1] if chosen else 0 : gap]), made, last, gap)
            places = range(gap, heavy[k], -1)
            older = min((p for p in places if alive[p] == alive[gap]), key=new.__getitem__)
            chosen.append(older if 2 * new[older] < new[gap] else gap)
            inside |= set() if is_least else {chosen[-1]}
            # Another before much is made of what is kept already, as a norm of all features: in the backward pass that is gone
            # when what made the last of the parts runs again.
            few = min(places, key=lambda p: (new[p], alive[p]))
            if few < chosen[-1] and _MANY_MORE * new[few] < max(new[few : chosen[-1]]):
                inside.add(few)
                chosen.insert(-1, few)
    while len(chosen) > _MOST_PIECES:
        # Of places with as many bytes the one that leaves the shortest piece, so that those that stay are spread out.
        ends = zip(chosen, [0, *chosen], [*chosen[1:], len(eqns)], strict=False)
        length = {place: after - before for place, before, after in ends}
        chosen.remove(max(chosen, key=lambda p: (p in inside, alive[p], -length[p])))
    forced = {i + step for i, eqn in enumerate(eqns) for step in (0, 1) if any(eqn is other for other in alone)}
    inner = (set(chosen) | forced) - {0, len(eqns)}
    return [0, *sorted(inner), len(eqns)]


def _alive(of: Iterable[Any], made: dict[Any, int], last: dict[Any, int], stop: int) -> list[int]:
    """Bytes alive at each place up to `stop` of variables that are made at numbers `made` and read last at `last`, if at all."""
    change = [0] * (stop + 2)
    for var in of:
        if var in last:
            change[made[var] + 1] += array_bytes(var)
            change[min(last[var], stop) + 1] -= array_bytes(var)
    return list(accumulate(change))[: stop + 1]


def backward_turns(program: Program, backward: Program, cuts: Sequence[int], free: set[Any]) -> list[int]:
    """For each equation of the backward pass the piece in whose turn it runs; the last piece has the first turn.

    An equation that reads a residual runs when the residual's piece has its turn, or later if its cotangents come later. One that
    reads none waits until what reads its result runs. If its result is smaller than what it is made from, it waits no longer than
    that is alive for others: the sums of a bias, and of a scale, then take one pass over the cotangent that both read.
    """
    piece: dict[Any, int] = {}
    last_reader: dict[Any, int] = {}
    for number, (start, stop) in enumerate(pairwise(cuts)):
        eqns = [eqn for eqn in program.eqns[start:stop] if eqn.outvars]
        piece |= dict.fromkeys(made_by(eqns), number)
        last_reader |= dict.fromkeys(read_by(eqns), number)

    def turn_of(var: Any) -> int | None:
        """When a residual is read: in its piece, or, if it is an input of later pieces, in the last one of these."""
        if var in free or (var not in piece and var not in last_reader):
            return None
        return max(piece.get(var, 0), last_reader.get(var, 0))

    n = len(cuts) - 1
    when: dict[Any, int] = {}
    turns: list[int] = []
    reads = []
    for eqn, inputs in zip(backward.eqns, backward.flow.reads, strict=True):
        own = [turn for var in inputs if (turn := turn_of(var)) is not None]
        reads.append(bool(own))
        turn = min([n - 1, *own, *(when[var] for var in inputs if var in when)])
        turns.append(turn)
        when |= dict.fromkeys(eqn.outvars, turn)
    _wait(backward, turns, reads)
    return turns


def _wait(backward: Program, turns: list[int], reads: Sequence[bool]) -> None:
    """Let equations that read no residual wait, as `backward_turns` says: changes `turns`.

    Args:
      backward: the backward pass.
      turns: of its equations, as early as they can run.
      reads: which of them read residuals.
    """
    flow = backward.flow
    outputs = set(variables(backward.outvars))
    needed: dict[int, int] = {}  # the first turn in which something follows that reads a residual
    for i in range(len(backward.eqns) - 1, -1, -1):
        eqn = backward.eqns[i]
        after = [one for out in eqn.outvars for one in flow.readers.get(out, [])]
        needed[i] = turns[i] if reads[i] else max((needed[one] for one in after), default=0)
        if reads[i]:
            continue
        inputs = [var for var in flow.reads[i] if var in flow.place]
        shrinks = sum(map(array_bytes, eqn.outvars)) < sum(map(array_bytes, inputs))
        if not shrinks and outputs.isdisjoint(eqn.outvars):
            turns[i] = min(turns[i], max((turns[one] for one in after), default=turns[i]))
        elif shrinks:
            others = [[turns[one] for one in flow.readers[var] if one != i] for var in inputs]
            alive_until = max(min(there, default=turns[i]) for there in others)
            turns[i] = min(turns[i], max(needed[i], alive_until))
    when: dict[Any, int] = {}
    ordered = max(turns, default=0)
    for i, eqn in enumerate(backward.eqns):  # what follows an equation that waits does so, too
        turns[i] = min([turns[i], *(when[var] for var in flow.reads[i] if var in when)])
        if is_ordered(eqn):  # callbacks stay in their order
            turns[i] = ordered = min(turns[i], ordered)
        when |= dict.fromkeys(eqn.outvars, turns[i])
