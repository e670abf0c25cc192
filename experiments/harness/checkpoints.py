"""Checkpoints: the whole state of a run, written in the background, put in place in one piece, rotated."""

import os
from collections.abc import Mapping
from pathlib import Path

import grain
import jax
import orbax.checkpoint as ocp

from experiments.harness.config import ExperimentError, RunConfig, as_dict, check_resumable
from experiments.harness.step import TrainState


class Checkpoints:
    """The checkpoints in `config.folder / "checkpoints"`: state, position in the data, configuration.

    Raises ExperimentError if nothing can be written there.
    """

    def __init__(self, config: RunConfig):
        self._config = config
        self._folder = (config.folder / "checkpoints").absolute()
        _require_writable(self._folder)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep_checkpoints,
            cleanup_tmp_directories=True,  # what a killed run left half written
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def check(self) -> None:
        """Raises ExperimentError if the newest checkpoint is of another architecture or data order."""
        step = self._manager.latest_step()
        if step is not None:
            args = ocp.args.Composite(config=ocp.args.JsonRestore())
            saved: Mapping = self._manager.restore(step, args=args).config
            check_resumable(saved, self._config, self._folder / str(step))

    def save(self, state: TrainState, data: grain.DatasetIterator, step: int) -> None:
        """Copies the arrays to the host, then returns and writes in the background."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                data=grain.checkpoint.CheckpointSave(data),
                config=ocp.args.JsonSave(as_dict(self._config)),
            ),
        )

    def restore(self, like: TrainState, data: grain.DatasetIterator) -> TrainState:
        """The newest state, with the shapes, dtypes and shardings of `like`; moves `data` to where it was."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(
            self._manager.latest_step(),
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target), data=grain.checkpoint.CheckpointRestore(data)
            ),
        )
        return restored.state

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()


def _require_writable(folder: Path) -> None:
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ExperimentError(f"cannot write checkpoints to {folder}: {error.strerror}; choose --runs-dir") from error
