"""What a search for a plan does, said to whoever waits for it."""

from __future__ import annotations

import logging
import time

from memjax._core.check import readable_bytes

_PATIENCE = 5.0  # seconds before the first word


class Progress:
    """Says how far a search is, once it has taken a while: on standard error where rich is installed, or else to a logger.

    Args:
      name: of the step.
    """

    def __init__(self, name: str):
        self._name, self._begun, self._compiled = name, time.monotonic(), 0

    def compiled(self, nbytes: int, budget: int | str) -> None:
        """One more candidate has been compiled, and holds so many bytes."""
        self._compiled += 1
        if time.monotonic() - self._begun < _PATIENCE:
            return
        of = budget if isinstance(budget, str) else readable_bytes(budget)
        text = (
            f"memjax.jit plans {self._name}: {self._compiled} compiled, the last holds {readable_bytes(nbytes)} of {of}"
        )
        try:
            from rich.console import Console
        except ImportError:
            logging.getLogger("memjax").info(text)
        else:
            Console(stderr=True).print(text, style="dim", highlight=False)
