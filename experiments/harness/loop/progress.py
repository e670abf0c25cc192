"""What a run shows while it trains: a live line on a terminal, a plain line now and then anywhere else."""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from types import TracebackType

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

_PLAIN_EVERY_S = 10.0


class Display:
    """A context in which training is shown. Only the first of several processes shows anything."""

    def __init__(self, console: Console, *, total_steps: int, start: int):
        self._console = console
        self._total = total_steps
        self._live: Progress | None = None
        self._last_plain = 0.0
        if console.is_terminal and not console.quiet:
            self._live = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._live.add_task("train", total=total_steps, completed=start, status="")

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, step: int, *, loss: float, examples_per_second: float) -> None:
        status = f"loss {loss:.4f}  {examples_per_second:.0f} examples/s  {memory_in_use() / 2**20:,.0f} MiB"
        if self._live is not None:
            self._live.update(self._task, completed=step, status=status)
        elif time.monotonic() - self._last_plain >= _PLAIN_EVERY_S:
            self._last_plain = time.monotonic()
            self._console.print(f"step {step}/{self._total}  {status}")

    def message(self, text: str) -> None:
        self._console.print(text)


@contextlib.contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Says what takes long, and afterwards how long it took."""
    start = time.perf_counter()
    with console.status(Text(what)) if console.is_terminal else contextlib.nullcontext():
        yield
    console.print(f"{what}: {time.perf_counter() - start:.1f} s")


def memory_in_use() -> int:
    """Bytes in use on the first local device; on a CPU, the most this process has used so far."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics is not None:
        return statistics["bytes_in_use"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
