"""Compiling what a run's memory is compared with, while it trains."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable

import jax
from rich.console import Console

from experiments.harness import children
from experiments.harness.config import Config
from experiments.harness.loop.training import Trainer
from experiments.harness.task import Task


class Comparison:
    """A context in which another process compiles a task's comparison, with low priority, and writes memory.json.

    For a network without loops a CPU takes minutes, which need not be added to those of the training. On other devices and with
    several hosts nothing is started: their memory is for training, and the comparison follows it.

    Args:
      config: of the run.
      make_task: a function of a module, so that another process can find it.
      begins: whether there is anything to compare.
    """

    def __init__(self, config: Config, make_task: Callable[[Config], Task], *, begins: bool):
        self._process: multiprocessing.process.BaseProcess | None = None
        if begins and jax.default_backend() == "cpu" and jax.process_count() == 1:
            spawn = multiprocessing.get_context("spawn")
            self._process = spawn.Process(target=_compare, args=(config, make_task), daemon=True)

    def __enter__(self) -> "Comparison":
        if self._process is not None:
            self._process.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def done(self) -> bool:
        """Waits for the process. False if there is none, or if it failed: then it is still to be compared."""
        if self._process is None:
            return False
        self._process.join()
        return self._process.exitcode == 0


def _compare(config: Config, make_task: Callable[[Config], Task]) -> None:
    children.begin()
    os.nice(10)
    task = make_task(config)
    with contextlib.closing(task.train_batches):
        Trainer(config, task, Console(quiet=True)).measure()
