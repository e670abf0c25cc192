"""The largest batch that fits: the same step, traced with more and with fewer examples. Nothing is compiled."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from memjax._commands.devices import Gpus
from memjax._commands.factory import CommandError, said
from memjax._core import check
from memjax._core.arguments import is_array
from memjax._core.meshes import own_sharding
from memjax._jit.jit import Jitted
from memjax._jit.step_plan import StepPoint

_STEPS = 8  # between a batch and twice as many examples: predictions are no finer, and such numbers divide well
_QUICK = 8  # tries, before halves


class Largest(NamedTuple):
    """Examples that are predicted to fit.

    Attributes:
      as_written: with the fastest plan, which keeps everything.
      planned: with the plan of least memory.
    """

    as_written: int
    planned: int

    def __str__(self) -> str:
        written = f"{self.as_written:,}" if self.as_written else "none"
        return f"The largest batch, as predicted: {self.planned:,} examples; {written} without any plan"


def budget_for(budget: str, gpus: Gpus | None) -> int:
    """Bytes of a device that `--budget` stands for."""
    room = check.byte_count("budget", budget, words=("min", "device"), shares=True)
    if room == "device" and gpus is not None:
        return gpus.nbytes
    if room == "device":
        room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", room)
    if isinstance(room, str):
        raise CommandError(
            f"--batch-argnums needs bytes to fill, got --budget {room}: give --budget 40GiB, for example"
        )
    return room


def largest(step: Jitted, args: Sequence[Any], argnums: Sequence[int], batch: tuple[int, int], budget: int) -> Largest:
    """The largest batches within `budget` bytes of a device, where the arguments `argnums` have the examples on their first axis.

    Args:
      batch: how many examples there are, and what their number is a multiple of, from `batch_of`.
    """
    now, unit = batch[0] // batch[1], batch[1]

    @functools.cache
    def points(count: int) -> Sequence[StepPoint]:
        changed = [_resized(arg, count * unit) if i in argnums else arg for i, arg in enumerate(args)]
        try:
            return step.frontier(*changed)
        except (TypeError, ValueError) as error:
            what = f"--batch-argnums needs a step that runs with any number of examples, not with {count * unit}"
            raise CommandError(f"{what}: {said(error)}") from error

    if not points(now):
        raise CommandError("--batch-argnums needs a step with a gradient, and this one has none")
    return Largest(
        unit * _most(lambda count: points(count)[-1].nbytes, budget, now),
        unit * _most(lambda count: points(count)[0].nbytes, budget, now),
    )


_NUMBERS = [*range(1, _STEPS), *(m << e for e in range(60) for m in range(_STEPS, 2 * _STEPS))]


def _most(nbytes: Callable[[int], int], budget: int, start: int) -> int:
    """The largest number of `_NUMBERS` that fits; 0: none. Bytes, which take long to tell, grow nearly as a line does."""
    low, high, seen = -1, len(_NUMBERS), {}
    at = _index(start)
    while high - low > 1:
        count = _NUMBERS[at]
        seen[count] = nbytes(count)
        low, high = (at, high) if seen[count] <= budget else (low, at)
        guess = (low + high) // 2 if len(seen) > _QUICK and high < len(_NUMBERS) else _guess(seen, budget)
        at = min(max(guess, low + 1), high - 1)
    return _NUMBERS[low] if low >= 0 else 0


def _guess(seen: dict[int, int], budget: int) -> int:
    """Where the line through the two points that are nearest to the budget meets it."""
    (count, nbytes), *other = sorted(seen.items(), key=lambda point: abs(point[1] - budget))
    slope = (nbytes - other[0][1]) / (count - other[0][0]) if other else nbytes / count
    return _index(count + (budget - nbytes) / slope if slope > 0 else 2 * count)


def _index(number: float) -> int:
    return bisect.bisect(_NUMBERS, number) - 1


def batch_of(args: Sequence[Any], argnums: Sequence[int]) -> tuple[int, int]:
    """Examples in these arguments, and what their number is a multiple of: devices that they are split over."""
    units, sizes = [1], set()
    for i in argnums:
        if not 0 <= i < len(args):
            raise CommandError(f"--batch-argnums must be numbers of the {len(args)} arguments, from 0, got {i}")
        leaves = jax.tree.leaves(args[i])
        if not leaves or not all(is_array(leaf) and leaf.ndim for leaf in leaves):
            raise CommandError(f"--batch-argnums must be of arrays with a first axis, got {check.shown(args[i])}")
        for leaf in leaves:
            sharding = own_sharding(leaf)
            sizes.add(leaf.shape[0])
            if sharding is not None:
                units.append(leaf.shape[0] // sharding.shard_shape(leaf.shape)[0])
    if len(sizes) != 1:
        shown = " and ".join(map(str, sorted(sizes)))
        raise CommandError(
            f"--batch-argnums must be of arrays with as many examples each, got {shown}: name those of the batch"
        )
    return sizes.pop(), math.lcm(*units)


def _resized(arg: Any, count: int) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (count, *leaf.shape[1:]),
            leaf.dtype,
            sharding=own_sharding(leaf),
            weak_type=getattr(leaf, "weak_type", False),
        ),
        arg,
    )
