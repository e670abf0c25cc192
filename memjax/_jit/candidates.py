"""Candidates for the way to run a step: what is predicted of them, what they hold when compiled, and how passes are run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from memjax._core.meshes import device_of, is_in_host_memory
from memjax._jit.derivatives.body import Acting
from memjax._jit.derivatives.passes import StepPasses
from memjax._jit.step_plan import StepPlan
from memjax._plan.budget.known import Key
from memjax._plan.run import Run

Compile = Callable[[Acting], Any]
"""Compiles the step with these passes run otherwise than they are."""
Chosen = dict[StepPasses, tuple[Run, Key]]
"""How passes are run, and what tells that from other ways."""


class DoesNotFitError(ValueError):
    """No plan fits the budget. It has the plan that takes the least, and the program."""

    def __init__(self, plan: StepPlan, program: Any):
        super().__init__(f"the least possible is {plan.nbytes} bytes")
        self.plan, self.program = plan, program


class Rank(NamedTuple):
    """What ways to run a step are compared by, the less the better.

    Attributes:
      cost: predicted seconds, infinite where no plan fits; or bytes.
      again: of these seconds, what is computed again.
    """

    cost: float
    again: float


class Compiled(NamedTuple):
    """A compiled step.

    Attributes:
      program: the executable.
      nbytes: what it holds on a device: see `held_bytes`.
      predicted: the same, as it was predicted before it was compiled.
      acting: how its passes are run.
    """

    program: Any
    nbytes: int
    predicted: int
    acting: Chosen


def held_bytes(program: Any) -> int:
    """Bytes of a device that a compiled program holds: arguments, results that are no donated arguments, temporaries, code."""
    found = program.memory_analysis()
    return sum(fixed_bytes(program)) + found.temp_size_in_bytes + found.generated_code_size_in_bytes


def fixed_bytes(program: Any) -> tuple[int, int]:
    """Bytes of a device for arguments, and for results that are no donated arguments, of a compiled step.

    XLA:CPU counts what lies in the memory of the host, which is that of the CPU. Here it does not count, so that a step can be
    tried on a CPU.
    """
    found = program.memory_analysis()
    # An empty part of the arguments is None in both trees. The sharding of an argument that is not read is None, too.
    leaves = functools.partial(jax.tree.leaves, is_leaf=lambda one: one is None)
    pairs = zip(leaves(program.args_info), leaves(program.input_shardings), strict=True)
    on_host = sum(_on_host_of_cpu(info._aval, sharding) for info, sharding in pairs if info is not None)
    return found.argument_size_in_bytes - on_host, found.output_size_in_bytes - found.alias_size_in_bytes


def _on_host_of_cpu(aval: Any, sharding: Any) -> int:
    if not is_in_host_memory(sharding) or device_of([sharding]).platform != "cpu":
        return 0
    return math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize


def key_of_all(acting: Chosen) -> frozenset[Any]:
    """What tells a step with its passes run so from others."""
    return frozenset((one, key) for one, (_, key) in acting.items())


def leanest(found: Sequence[tuple[StepPlan, Any]]) -> tuple[StepPlan, Any]:
    """What takes the least, of equals the one that was decided on last."""
    return min(reversed(found), key=lambda one: one[0].nbytes)
