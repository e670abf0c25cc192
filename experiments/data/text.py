"""Windows of bytes cut from a text, and a text that is on every machine: the source of Python's standard library."""

import functools
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grain
import jax
import numpy as np

from experiments.harness.errors import ExperimentError

# Not the library's own code, or not on every machine.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
_TEST_EVERY = 20  # one file in so many is for testing
BYTES = 256  # the vocabulary


@dataclass(frozen=True)
class Text:
    """Bytes of two splits, each a one-dimensional uint8 array."""

    train: np.ndarray
    test: np.ndarray


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _LEFT_OUT
        yield from (Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))


@functools.cache
def standard_library(folder: Path | None = None) -> Text:
    """The .py files below `folder` (default: this Python's standard library), by path, each ended by a zero byte.

    A file belongs to a split by its name alone, so that versions of Python agree on most of it.

    Raises:
      ExperimentError: a split has no files.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    files = sorted(_sources(root))
    splits: dict[bool, list[bytes]] = {False: [], True: []}
    for path in files:
        testing = zlib.crc32(path.as_posix().encode()) % _TEST_EVERY == 0
        splits[testing] += [(root / path).read_bytes(), b"\0"]
    if not all(splits.values()):
        raise ExperimentError(f"{root} has too few Python files to train and test on: {len(files)}")
    train, test = (np.frombuffer(b"".join(splits[testing]), np.uint8) for testing in (False, True))
    return Text(train, test)


def train_windows(
    text: Text, *, length: int, batch_size: int, seed: int, hosts: int | None = None
) -> grain.DatasetIterator:
    """Batches without end of `text`, (B, length + 1) uint8; this host's share of `batch_size`, of all hosts or of so many.

    An epoch has as many windows as fit side by side; each is cut near its place there, at random. The position can be
    saved.
    """
    count = windows(text.train, length)
    shuffled = grain.MapDataset.range(count).seed(seed).shuffle().repeat()
    hosts = hosts or jax.process_count()
    share = shuffled[jax.process_index() :: hosts] if hosts > 1 else shuffled
    cut = share.random_map(lambda i, rng: {"text": _window(text.train, i * length + int(rng.integers(length)), length)})
    return iter(cut.to_iter_dataset().batch(batch_size // hosts, drop_remainder=True))


def test_windows(text: Text, *, length: int, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """One pass over the test split in windows side by side, as many as fill whole batches; this host's share.

    Raises:
      ExperimentError: it does not fill one.
    """
    count = windows(text.test, length) // batch_size * batch_size
    if count == 0:
        raise ExperimentError(
            f"--batch-size {batch_size} windows of {length} bytes are more than the {text.test.size} bytes to test on"
        )
    for start in range(0, count, batch_size):
        own = range(start + jax.process_index(), start + batch_size, jax.process_count())
        yield {"text": np.stack([_window(text.test, i * length, length) for i in own])}


def check_windows(text: Text, length: int, batch_size: int) -> None:
    """Raises ExperimentError unless both splits have enough windows of `length` bytes for a batch."""
    for data, use in ((text.train, "train on"), (text.test, "test on")):
        if windows(data, length) < batch_size:
            raise ExperimentError(
                f"--batch-size {batch_size} windows of --length {length} bytes are more than the {data.size} bytes to {use}"
            )


def windows(data: np.ndarray, length: int) -> int:
    """How many windows of `length` bytes, and one to predict, fit side by side."""
    return (len(data) - 1) // length


def _window(data: np.ndarray, start: int, length: int) -> np.ndarray:
    start = min(start, len(data) - length - 1)
    return data[start : start + length + 1]
