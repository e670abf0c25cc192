"""A way through a chain with a little less kept: what fits where the way itself takes slightly too much."""

from __future__ import annotations

from collections.abc import Sequence

from memjax._plan.solve.chain import Chain, Choice, peak_of
from memjax._plan.solve.segment import Option


def leaner(
    chain: Chain, choices: Sequence[Choice], seconds: float, nbytes: float = 0.0, most: float = 0.0
) -> list[Choice]:
    """The way with less kept where that costs least for its bytes: so many seconds more altogether, and no more bytes at once.

    What it keeps less of may be alive when the compiled step takes most, though not when the model has it take most. Up to
    `most` seconds more it may take until it keeps `nbytes` less.
    """
    most = max(most, seconds)
    found, peak = list(choices), peak_of(choices)
    others = [chain.options_of(one) for one in choices]
    while True:
        best: tuple[float, int, Option] | None = None
        for at, one in enumerate(found):
            for option in others[at]:
                saved, more = one.option.kept_nbytes - option.kept_nbytes, option.seconds - one.option.seconds
                if (
                    saved <= 0
                    or more > (most if nbytes > 0 else seconds)
                    or (best is not None and more / saved >= best[0])
                ):
                    continue
                if peak_of([*found[:at], one._replace(option=option), *found[at + 1 :]]) <= peak:
                    best = more / saved, at, option
        if best is None:
            return found
        _, at, option = best
        before = found[at].option
        seconds, most = (left - (option.seconds - before.seconds) for left in (seconds, most))
        nbytes -= before.kept_nbytes - option.kept_nbytes
        found[at] = found[at]._replace(option=option)
