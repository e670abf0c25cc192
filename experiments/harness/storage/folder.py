"""The folder of a run, which belongs to one process, or to the processes of one run."""

import contextlib
from collections.abc import Iterator

import jax

from experiments.harness import devices, files
from experiments.harness.config import RunConfig
from experiments.harness.errors import ExperimentError


@contextlib.contextmanager
def taken(config: RunConfig) -> Iterator[None]:
    """A context in which no other run can write to the folder of this one. All hosts enter it together.

    Raises:
      ExperimentError: the folder cannot be written, is in use, or holds a run that is not to be resumed.
    """
    with contextlib.ExitStack() as stack:
        with devices.refusing_together():
            if jax.process_index() == 0:
                stack.enter_context(files.locked(config.folder))
            if not config.resume and (config.folder / "config.json").exists():
                raise ExperimentError(f"{config.folder} holds a run already: add --resume, or choose another --name")
        yield
