"""Checkpoints: the whole state of a run, written in the background, put in place in one piece, rotated, checked when read."""

import contextlib
import copy
import functools
import glob
import json
import logging
import sys
import zlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import NamedTuple

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from rich.console import Console

from experiments.harness import devices, files
from experiments.harness.config import RunConfig, as_dict, changed_flags, check_resumable
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.step import TrainState


class Restored(NamedTuple):
    state: TrainState
    step: int


class Checkpoints:
    """A context with the checkpoints in `config.folder / "checkpoints"`: state, position in the data, configuration.

    With each of them checksums of all that are saved, for neither the file system nor the format has any of arrays.

    Raises:
      ExperimentError: nothing can be written there, or it has a name that Orbax cannot write to.
    """

    def __init__(self, config: RunConfig, console: Console):
        self._config, self._console = config, console
        self._folder = (config.folder / "checkpoints").absolute()

    def __enter__(self) -> "Checkpoints":
        if glob.has_magic(str(self._folder)):
            # What it makes of such a folder can never be read again.
            raise ExperimentError(
                f"{self._folder} must have none of *?[ in it, which Orbax takes for a pattern: choose another --runs-dir "
                "or --name"
            )
        with devices.refusing_together(), files.writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder.parent / f".writable.{jax.process_index()}"  # processes must not delete each other's
            probe.touch()
            probe.unlink()
        _hush()
        _write_whole()
        self._manager = self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):  # what went wrong in the background, `save` or `wait` have said
            self._manager.close()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._config.keep_checkpoints,
            cleanup_tmp_directories=True,  # what a killed run left half written
            lightweight_initialize=True,  # reads no step, since one may be damaged
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def check(self) -> None:
        """Raises ExperimentError if the newest readable checkpoint is of another architecture or data order."""
        with devices.refusing_together():
            for step in self._steps():
                with contextlib.suppress(_Damaged):
                    check_resumable(self._saved_config(step), self._config, self._folder / str(step))
                    return

    def save(self, state: TrainState, data: grain.DatasetIterator, step: int) -> None:
        """Copies the arrays to the host, then returns and writes in the background.

        Raises:
          ExperimentError: this one, or the one before, cannot be written.
        """
        config = as_dict(self._config)
        sums = {"state": _state_sums(state), "data": _data_sums(data.get_state()), "config": _sum_of_json(config)}
        sums["step"] = step
        with self._written():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=grain.checkpoint.CheckpointSave(data),
                    config=ocp.args.JsonSave(config),
                    checksums=ocp.args.JsonSave(sums),
                ),
            )

    def restore(self, like: TrainState, data: grain.DatasetIterator) -> Restored | None:
        """The newest state that is whole, with the shapes, dtypes and shardings of `like`; moves `data` to where it was.

        Newer ones that are damaged are moved to the folder "damaged" of the run, and it is said so. None if nothing was
        saved yet.

        Raises:
          ExperimentError: there are checkpoints, but none that these flags can continue.
        """
        failed: dict[int, str] = {}
        for step in self._steps():
            try:
                saved = self._saved_config(step)
                check_resumable(saved, self._config, self._folder / str(step))
                state, problem = self._restore_step(step, like, data), ""
            except _Damaged as error:
                problem = str(error)
            if devices.on_any_host(bool(problem)):
                failed[step] = problem or "another host cannot read it"
                continue
            self._put_aside(failed, step)
            return Restored(state, step)
        if failed:
            self._refuse(failed)
        return None

    def wait(self) -> None:
        """Until everything is written. Raises ExperimentError if something cannot be."""
        with self._written():
            self._manager.wait_until_finished()

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def _saved_config(self, step: int) -> Mapping:
        saved = self._item(step, config=ocp.args.JsonRestore()).config
        if not isinstance(saved, dict):
            raise _Damaged("its configuration cannot be read")
        return saved

    def _restore_step(self, step: int, like: TrainState, data: grain.DatasetIterator) -> TrainState:
        """Raises _Damaged if the checkpoint cannot be read, or is not what was saved."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        position = grain.checkpoint.CheckpointRestore(data)
        found = self._item(step, state=ocp.args.StandardRestore(target), data=position, config=ocp.args.JsonRestore())
        if not (self._folder / str(step) / "checksums").exists():
            self._console.print(f"{self._folder / str(step)} is of a version without checksums: it was not checked")
            return found.state
        wanted = self._item(step, checksums=ocp.args.JsonRestore()).checksums
        process = f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        try:
            position = json.loads((self._folder / str(step) / "data" / process).read_text())
            sums = {
                "state": _state_sums(found.state) == wanted["state"],
                "data": _sum_of_json(position) == wanted["data"][jax.process_index()],
                "config": _sum_of_json(found.config) == wanted["config"],
            }
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise _Damaged(_first_line(error)) from error
        if wrong := [name for name, equal in sums.items() if not equal]:
            raise _Damaged(f"checksums say that its {' and '.join(wrong)} changed after it was saved")
        if (saved_at := wanted.get("step", step)) != step:
            raise _Damaged(f"it was saved at step {saved_at}, and its folder was renamed")
        return found.state

    def _item(self, step: int, **args: ocp.args.CheckpointArgs) -> ocp.args.Composite:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**args))
        except (
            Exception
        ) as error:  # files cut short, emptied or garbled let Orbax and what it is made of raise anything
            raise _Damaged(_first_line(error)) from error

    def _put_aside(self, failed: Mapping[int, str], good: int) -> None:
        for step, problem in failed.items():
            damaged = self._folder / str(step)
            aside = self._folder.parent / "damaged"
            target = next(path for i in range(10**6) if not (path := aside / f"{step}.{i}").exists())
            if jax.process_index() == 0:
                with files.writing(aside):
                    aside.mkdir(exist_ok=True)
                    damaged.rename(target)
            self._console.print(f"The checkpoint {damaged} is damaged: {problem}", soft_wrap=True)
            self._console.print(f"It is now in {target}; going on from step {good}", soft_wrap=True)
        if failed:
            multihost_utils.sync_global_devices("damaged checkpoints are put aside")
            self._manager.reload()

    def _refuse(self, failed: Mapping[int, str]) -> None:
        problems = "; ".join(f"{step}: {problem}" for step, problem in failed.items())
        changed: list[str] = []
        for step in failed:
            with contextlib.suppress(_Damaged):
                changed = changed_flags(self._saved_config(step), self._config)
        fix = f"delete {self._folder} to train this run again from the start, or choose another --name"
        if changed:
            fix = f"leave out flags that the run was not started with ({', '.join(changed)}); if that is no help, {fix}"
        raise ExperimentError(f"no checkpoint in {self._folder} can be continued ({problems}): {fix}")

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of writing in the background, of any kind
            raise ExperimentError(
                f"cannot write checkpoints to {self._folder} ({_first_line(error)}): if the disk is full, free some space; "
                "then go on with --resume"
            ) from error


class _Damaged(Exception):
    """A checkpoint that cannot be read, or is not what was saved."""


@functools.cache
def _hush() -> None:
    """Orbax logs and prints, from threads and late, tracebacks of errors that it raises as well, and of reads that it gave up."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda args: None if str(args.exc_value) == "Event loop is closed" else hook(args)
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
    logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname)


@functools.cache
def _write_whole() -> None:
    """Orbax would have each device with a copy of an array write a slice of it, and compile a program for each slice."""
    handler = copy.copy(ocp.type_handlers.get_type_handler(jax.Array))  # a new one would not know of random keys
    handler._use_replica_parallel = False
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


def _state_sums(state: TrainState) -> dict[str, int]:
    """CRC-32 of each array, its shape and dtype."""
    sums = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        raw = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        array = _on_host(raw)
        values = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        sums[jax.tree_util.keystr(path)] = zlib.crc32(f"{array.shape} {array.dtype}".encode(), values)
    return sums


def _on_host(array: jax.Array) -> np.ndarray:
    """All of an array, on every host."""
    if array.is_fully_replicated or array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def _data_sums(position: object) -> list[int]:
    """The checksums of the positions of all hosts."""
    return [int(x) for x in multihost_utils.process_allgather(np.uint32(_sum_of_json(position))).reshape(-1)]


def _sum_of_json(value: object) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 160 else lines[0][:157] + "..."
