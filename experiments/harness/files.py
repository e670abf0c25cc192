"""Files of a run: written in one piece, read with errors that name them, and one process at a time that writes."""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.harness.errors import ExperimentError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which an OSError becomes an ExperimentError that says that `path` cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        fix = "free some space, then go on with --resume" if error.errno in _FULL else "choose another --runs-dir"
        raise ExperimentError(f"cannot write {path}: {error.strerror or error}; {fix}") from error


@contextlib.contextmanager
def in_one_piece(path: Path) -> Iterator[Path]:
    """Gives a path to write to, whose file replaces `path` at the end: a kill or a full disk leaves the old file or the new."""
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    with writing(path):
        try:
            yield part
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with in_one_piece(path) as part:
        part.write_text(text, encoding="utf-8")


def read_json(path: Path, kind: type, fix: str) -> Any:
    """What the JSON file holds. Raises ExperimentError with `fix` if that is no JSON, or not of the `kind`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExperimentError(f"{path} does not exist: {fix}") from None
    except OSError as error:
        raise ExperimentError(f"cannot read {path}: {error.strerror}: {fix}") from error
    except ValueError as error:  # of JSON, or of UTF-8
        raise ExperimentError(f"{path} is damaged ({error}): {fix}") from error
    if not isinstance(found, kind):
        raise ExperimentError(f"{path} is damaged (no {kind.__name__}): {fix}")
    return found


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the run's folder, and keeps other processes from writing to it.

    The operating system gives a lock up when its process ends, however it ends, so none is left behind by a kill.

    Raises:
      ExperimentError: the folder cannot be written, or another process has locked it.
    """
    with contextlib.ExitStack() as stack:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("a+", encoding="utf-8"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ExperimentError(
                f"{folder} is in use by another process ({file.read(200).strip() or 'unknown'}): wait for its end, stop it, "
                "or choose another --name"
            ) from None
        except OSError:  # a file system without locks
            pass
        with writing(folder):
            file.truncate(0)
            file.write(f"{os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
