"""The moves that a schedule is made of."""

from __future__ import annotations

from typing import NamedTuple

INIT = -1  # the state the whole chain starts from, where it is not one of the slots ("internal")
CORE = -2  # the working core: one internal state, used up by the backward step that follows


class Action(NamedTuple):
    """One move of the machine: a working hidden state, a working core and the slots.

    kind        meaning
    "load"      the working state becomes the state before step `start`, kept in `slot`
    "advance"   run steps `start` to `stop - 1` from the working state
    "store"     keep the working state, the one before step `start`, in `slot`
    "keep"      run step `start`, its internal state kept from `slot` on, or in the working core (CORE)
    "backward"  backpropagate step `start` from the internal state in `slot` or CORE, which is then free
    "free"      `slot` is free from now on
    """

    kind: str
    start: int
    stop: int
    slot: int
