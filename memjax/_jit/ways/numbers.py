"""In how many microbatches a step runs: by what is predicted, and then by what was compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from memjax._jit.fit import Fit
from memjax._plan.budget.search import Patience, search

_PARTS = 5  # numbers of microbatches that a frontier has, at most


class Numbers:
    """The step in any number of microbatches that divides the number of examples.

    Args:
      length: how many examples there are.
      beside: bytes of a device that do not become fewer with more microbatches, about.
      divisible: bytes that do, with everything kept: those of one microbatch of all examples.
      fit_in: the step in so many microbatches; None where an equation cannot run so.
    """

    def __init__(self, length: int, beside: int, divisible: int, fit_in: Callable[[int], Fit | None]):
        self._possible = [count for count in range(2, length + 1) if length % count == 0]
        self._beside, self._predicted = beside, [divisible // count for count in self._possible]
        self._fit_in = functools.cache(fit_in)

    def for_frontier(self) -> list[Fit]:
        """The step in few microbatches."""
        return self._fits(self._possible[:_PARTS])

    def most(self) -> list[Fit]:
        """The step in the most microbatches."""
        return self._fits(self._possible[-1:])

    def worth_a_try(self, budget: int) -> list[Fit]:
        """The step in the fewest that are predicted to fit, and in the next fewer: with something computed again these may be as
        fast."""
        room, sizes = budget - self._beside, self._predicted
        first = next((i for i, nbytes in enumerate(sizes) if nbytes <= room), len(sizes) - 1)
        return self._fits(self._possible[max(first - 1, 0) : first + 1])

    def that_fits(self, budget: int) -> Fit | None:
        """The step in the fewest that fit with everything kept, as far as a few of them tell that are compiled."""
        line, room = self._possible[::-1], budget - self._beside
        if not line:
            return None
        # What is off is what becomes fewer, and by a factor.
        compiled = lambda number: self._nbytes(line[number]) - self._beside
        tries = search(self._predicted[::-1], [*map(float, line)], room, compiled, patience=_FEW)
        fitting = [one.number for one in tries if one.compiled <= room]
        return self._fit_in(line[max(fitting)]) if fitting else None

    def leanest(self) -> Fit | None:
        """The step in the number that takes the least with everything kept, if it can run in microbatches.

        Those of one example can take more than those of two, as XLA runs their products in another way. So fewer are tried, about
        half as many each time, while that takes less.
        """
        least, last = 0, sys.maxsize
        for count in reversed(self._possible):
            if 2 * count > last:
                continue
            if least and self._nbytes(count) > self._nbytes(least):
                break
            least = last = count
        return self._fit_in(least) if least else None

    def _fits(self, numbers: list[int]) -> list[Fit]:
        return [fit for fit in map(self._fit_in, numbers) if fit is not None]

    def _nbytes(self, count: int) -> int:
        """Compiled, with everything kept."""
        fit = self._fit_in(count)
        return sys.maxsize if fit is None else fit.plain.nbytes


_FEW = Patience(gain=0.25, enough=2)  # of the number of microbatches
