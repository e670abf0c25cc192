"""What a search for a plan does, said to whoever waits for it."""

from __future__ import annotations

import logging
import sys
import time

from memjax._core.check import readable_bytes
from memjax._jit.step_plan import StepPlan
from memjax._jit.summary import head

_PATIENCE = 5.0  # seconds before the first word
_WHY = (
    'budget="min" compiles plans until none is expected to take less, which can take minutes; bytes, or a share such as "50%", '
    "take fewer"
)


class Progress:
    """Says how far a search is, once it has taken a while: on standard error where rich is installed, or else to a logger.

    Args:
      name: of the step.
    """

    def __init__(self, name: str):
        self._name, self._begun, self._compiled, self._has_spoken = name, time.monotonic(), 0, False
        self._least = sys.maxsize

    def compiled(self, nbytes: int, budget: int | str, way: tuple[int, int] | None) -> None:
        """One more candidate has been compiled, and holds so many bytes; in which of at most how many ways to run the step."""
        self._compiled, self._least = self._compiled + 1, min(nbytes, self._least)
        if time.monotonic() - self._begun < _PATIENCE:
            return
        if isinstance(budget, str) and not self._has_spoken:
            self._say(f"plans {self._name}: {_WHY}")
        place = "" if way is None or way[1] == 1 else f" (way {way[0]} of at most {way[1]} to run the step)"
        found = f"the least holds {readable_bytes(self._least)}"
        if not isinstance(budget, str):
            found = f"the last holds {readable_bytes(nbytes)} of {readable_bytes(budget)}"
        self._say(f"plans {self._name}: {self._compiled} compiled{place}, {found}")

    def done(self, plan: StepPlan) -> None:
        """This is the plan."""
        if self._has_spoken:
            self._say(f"has planned {self._name}: {head(plan)}")

    def _say(self, what: str) -> None:
        self._has_spoken, text = True, f"memjax.jit {what}"
        try:
            from rich.console import Console
        except ImportError:
            logging.getLogger("memjax").info(text)
        else:
            Console(stderr=True).print(text, style="dim", highlight=False, soft_wrap=True)
