"""Ctrl-C (and SIGTERM) as a wish to stop that training looks at between steps."""

import signal
from types import FrameType, TracebackType

import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console


class Interrupt:
    """A context in which the first SIGINT or SIGTERM sets `requested`; a second SIGINT stops at once."""

    def __init__(self, console: Console):
        self.requested = False
        self._console = console

    def __enter__(self) -> "Interrupt":
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self._console.print("Stopping after this step and saving; Ctrl-C again to stop at once.")

    def on_any_host(self) -> bool:
        """Whether a process of any host was asked to stop. All must call this at the same step."""
        return bool(np.any(multihost_utils.process_allgather(np.array(self.requested))))
