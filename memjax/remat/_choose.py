"""Choosing what a scan executes: the exact schedule for some slots, or the fastest plan within a budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from memjax.remat._forward_counts import HiddenCounts
from memjax.remat._jaxpr import expensive
from memjax.remat._plan import Plan
from memjax.remat._schedule import Strategy, schedule
from memjax.remat._step import Backward, Step, nbytes


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times to predict with, in seconds.

    Attributes:
      forward: one step forward.
      backward: one step backward.
      loop: starting a loop over the steps of a block.
      branch: one move of a table that has several kinds of moves.
    """

    forward: float
    backward: float
    loop: float
    branch: float


def exact(length: int, slots: int, strategy: Strategy, kept: int, carry: int) -> Plan:
    """The schedule for `slots` units of one carry, single steps as blocks."""
    size = 1 + -(-kept // max(carry, 1))
    return Plan(length, 1, 1, schedule(length, slots, strategy=strategy, internal_size=size))


def choose(length: int, budget: int, step: Step, backward: Backward, costs: Costs | None) -> Plan:
    """The plan of the least predicted time within `budget` bytes."""
    costs = costs or model(step)
    carry, kept = step.carry_nbytes, backward.kept_nbytes
    best, best_time = None, float("inf")
    for plan, seconds in itertools.chain(
        _nests(length, budget, carry, kept, costs), _tables(length, budget, carry, kept, costs)
    ):
        if seconds < best_time:
            best, best_time = plan, seconds
    if best is None:
        least = Plan(length, 1, 1, schedule(length, 1, strategy="hidden"))
        raise ValueError(
            f"budget is {budget} bytes, but the least possible is {least.stored_bytes(carry, kept)}: "
            f"two carries of {carry} and one step's residuals of {kept}; it would take "
            f"{least.forward_steps / length:.0f} forward steps per step. Give a larger budget"
        )
    return best


def model(step: Step) -> Costs:
    """Rough times from the step's operations: only their ratios matter for the choice."""
    heavy = sum(expensive(eqn) for eqn in step.jaxpr.eqns)
    moved = sum(_nbytes(var) for eqn in step.jaxpr.eqns for var in (*eqn.invars, *eqn.outvars))
    flops = sum(_flops(eqn) for eqn in step.jaxpr.eqns)
    if jax.default_backend() == "gpu":
        forward = 3e-6 * (1 + heavy) + flops / 4e13 + moved / 2e13
        return Costs(forward, 2.5 * forward, loop=1e-5, branch=1e-5)
    forward = 2e-7 * len(step.jaxpr.eqns) + flops / 5e10 + moved / 4e10
    return Costs(forward, 2 * forward, loop=5e-7, branch=5e-7)


def _nbytes(atom: Any) -> int:
    return nbytes(atom.aval) if hasattr(atom.aval, "shape") else 0


def _flops(eqn: Any) -> float:
    """Of matrix products, at any depth; nothing else matters."""
    total = sum(_flops(inner) for jaxpr in core.jaxprs_in_params(eqn.params) for inner in jaxpr.eqns)
    if eqn.primitive.name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contract)
    return total


def _sizes(limit: int, ratio: float = 1.08) -> list[int]:
    """All small numbers and a geometric series of larger ones."""
    sizes, value = [], 1
    while value <= limit:
        sizes.append(value)
        value = max(value + 1, int(value * ratio))
    return sizes


def _nests(length: int, budget: int, carry: int, kept: int, costs: Costs) -> Iterator[tuple[Plan, float]]:
    """For each depth the fastest nest of equal parts."""
    base = length * (costs.forward + costs.backward)
    if length * kept + carry <= budget:
        yield Plan(length, 1, length), base
        return
    for depth, ratio in ((1, 1.01), (2, 1.08), (3, 1.25), (4, 1.5)):
        sizes = np.array(_sizes(length, ratio))
        block, *parts = np.meshgrid(*[sizes[sizes * carry <= budget]] * depth, indexing="ij", sparse=True)
        inner = sum((part * carry for part in parts), np.int64(0)) + block * kept  # while a block is backpropagated
        size = block * np.prod(np.broadcast_arrays(*parts), axis=0) if parts else block  # steps of an outermost part
        inner, size, block = np.broadcast_arrays(inner, size, block)
        # The tail: as many steps as its residuals fit, the rest being a whole number of outermost parts.
        smallest = length % size
        room = budget - (length // size + 1) * carry - smallest * kept
        more = np.where(room >= 0, room // np.maximum(size * kept - carry, 1), 0)
        tail = smallest + np.clip(more, 0, length // size) * size
        count = (length - tail) // size
        fits = (count >= 1) & ((count + 1) * carry + np.maximum(inner, tail * kept) <= budget)
        runs = length / block * np.ones_like(size)  # blocks advanced or backpropagated
        again = (length - tail).astype(float)
        above, rest = count.astype(float), size.astype(float)
        loops = 1.0 * runs + 2 * again / block
        for part in parts:
            rest = rest / part
            again = again + above * (part - 1) * rest
            loops = loops + above * (part - 1) * rest / block
            above = above * part
        seconds = np.where(fits, base + again * costs.forward + loops * costs.loop, np.inf)
        i = np.unravel_index(np.argmin(seconds), seconds.shape)
        if np.isfinite(seconds[i]):
            levels = [int(np.broadcast_to(part, seconds.shape)[i]) for part in parts]
            yield (
                Plan(length, int(block[i]), int(tail[i]), levels=(int(count[i]), *levels)),
                float(seconds[i]),
            )


def _tables(length: int, budget: int, carry: int, kept: int, costs: Costs) -> Iterator[tuple[Plan, float]]:
    """The optimal schedule of hidden states over blocks, for every size of block."""
    base = length * (costs.forward + costs.backward)
    for block in _sizes(length):
        tail = (length - 1) % block + 1
        parts = (length - tail) // block + 1
        slots = (budget - block * kept) // max(carry, 1) - 1
        if slots < 1:
            return
        slots = min(slots, parts)
        runs = HiddenCounts().count(parts, slots) - parts
        branch = costs.branch if runs > parts - 1 else 0.0
        seconds = base + runs * (block * costs.forward + branch) + (2 * parts + runs) * costs.loop
        yield Plan(length, block, tail, schedule(parts, slots, strategy="hidden")), seconds
