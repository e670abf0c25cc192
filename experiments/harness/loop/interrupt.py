"""Ctrl-C (and SIGTERM) as a wish to stop that training looks at between steps."""

import contextlib
import signal
from types import FrameType, TracebackType

from rich.console import Console

from experiments.harness import devices


class Interrupt:
    """A context in which the first SIGINT or SIGTERM sets `requested`; a second SIGINT stops at once.

    A third one ends the process where it is, should the second still wait for something.
    """

    def __init__(self, console: Console):
        self.requested = False
        self._at_once = False
        self._console = console

    def __enter__(self) -> "Interrupt":
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._at_once and error is not None and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error  # libraries in C turn one into an error of their own
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self._at_once = True
            raise KeyboardInterrupt
        self.requested = True
        with contextlib.suppress(RuntimeError):  # it came in the middle of another line
            self._console.print("Stopping after this step and saving; Ctrl-C again to stop at once.")

    def on_any_host(self) -> bool:
        """Whether a process of any host was asked to stop. All must call this at the same step."""
        return devices.on_any_host(self.requested)
