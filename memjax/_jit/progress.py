"""What a search for a plan does, said to whoever waits for it."""

from __future__ import annotations

import logging
import time

from memjax._core.check import readable_bytes
from memjax._jit.step_plan import StepPlan
from memjax._jit.summary import head

_PATIENCE = 5.0  # seconds before the first word


class Progress:
    """Says how far a search is, once it has taken a while: on standard error where rich is installed, or else to a logger.

    Args:
      name: of the step.
    """

    def __init__(self, name: str):
        self._name, self._begun, self._compiled, self._has_spoken = name, time.monotonic(), 0, False

    def compiled(self, nbytes: int, budget: int | str) -> None:
        """One more candidate has been compiled, and holds so many bytes."""
        self._compiled += 1
        if time.monotonic() - self._begun < _PATIENCE:
            return
        of = "" if isinstance(budget, str) else f" of {readable_bytes(budget)}"
        self._say(f"plans {self._name}: {self._compiled} compiled, the last holds {readable_bytes(nbytes)}{of}")

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
            Console(stderr=True).print(text, style="dim", highlight=False)
