"""Streams of batches: grain pipelines over images, without end for training, in one pass for evaluation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grain
import jax
import numpy as np
from absl import flags

from experiments.harness import children
from experiments.harness.loop.classification import NO_LABEL

Example = dict[str, np.ndarray]


@dataclass(frozen=True)
class ImageData:
    """Images with labels, in two splits.

    `train_example(item, rng)` and `test_example(item)` make an example from an item of the split: `image`,
    (H, W, C) uint8, and `label`, int32; None skips the item. They run in the loading processes.
    """

    train: Sequence
    test: Sequence
    train_example: Callable[[object, np.random.Generator], Example | None]
    test_example: Callable[[object], Example | None]
    classes: Sequence[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        return len(self.mean)


def train_batches(data: ImageData, *, batch_size: int, seed: int, workers: int) -> grain.DatasetIterator:
    """Batches without end, each epoch in another order; this host's share of `batch_size`.

    The iterator's position can be saved. The order depends on the seed, the batch size and the workers.
    """
    items = _this_hosts(grain.MapDataset.source(data.train).seed(seed).shuffle().repeat())
    examples = items.random_map(data.train_example).to_iter_dataset(_threads(16 if workers else 0))
    batches = examples.batch(batch_size // jax.process_count(), drop_remainder=True)
    if workers:
        flags.FLAGS.mark_as_parsed()  # grain's own settings are absl flags, which keep their defaults here
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
        batches = batches.mp_prefetch(options, worker_init_fn=_start_worker)
    return iter(batches)


def test_batches(data: ImageData, *, batch_size: int, workers: int) -> Iterator[Example]:
    """One pass over the test split in batches of equal size, the last ones filled up with unlabelled zeros.

    All hosts give the same number of batches. Threads load them, `workers` times 16: starting processes for
    each pass would take longer than a small one.
    """
    local_batch = batch_size // jax.process_count()
    examples = _this_hosts(grain.MapDataset.source(data.test)).map(data.test_example)
    batches = iter(examples.to_iter_dataset(_threads(16 * workers)).batch(local_batch))
    shape: tuple[int, ...] | None = None
    for _ in range(-(-len(data.test) // batch_size)):
        batch = next(batches, None)
        if batch is None:  # items were skipped, or this host has fewer
            shape = shape or _shape(data)
            batch = {"image": np.zeros((0, *shape), np.uint8), "label": np.zeros(0, np.int32)}
        shape = batch["image"].shape[1:]
        yield _filled_up(batch, local_batch)


def _this_hosts(items: grain.MapDataset) -> grain.MapDataset:
    return items[jax.process_index() :: jax.process_count()] if jax.process_count() > 1 else items


def _threads(count: int) -> grain.ReadOptions:
    return grain.ReadOptions(num_threads=count, prefetch_buffer_size=2 * count)


def _start_worker(index: int, count: int) -> None:
    children.begin()


def _shape(data: ImageData) -> tuple[int, ...]:
    return next(e for e in map(data.test_example, data.test) if e is not None)["image"].shape


def _filled_up(batch: Example, size: int) -> Example:
    missing = size - len(batch["label"])
    image = np.pad(batch["image"], [(0, missing), (0, 0), (0, 0), (0, 0)])
    return {"image": image, "label": np.pad(batch["label"], (0, missing), constant_values=NO_LABEL)}
