"""Steps of several processes: the first process decides, and all of them compile the same program."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memjax._core.meshes import own_sharding
from memjax._jit.step_plan import StepPlan


def is_first() -> bool:
    return jax.process_index() == 0


def are_in_all_processes(leaves: Sequence[Any]) -> bool:
    """Whether arguments lie on devices of all processes, of which there are several: then all of them call the step."""
    every = jax.process_count()
    if every == 1:
        return False
    shardings = [sharding for sharding in map(own_sharding, leaves) if sharding is not None]
    return any(len({device.process_index for device in one.device_set}) == every for one in shardings)


def compiler_options(platform: str) -> dict[str, bool]:
    """Options with which one process can compile a program of several.

    XLA has each process tune a part of the kernels for GPUs, and waits for the parts of the others.
    """
    return {"xla_gpu_shard_autotuning": False} if jax.process_count() > 1 and platform == "gpu" else {}


def plan_of_the_first(decide: Callable[[], StepPlan]) -> StepPlan:
    """The plan of the first process, sent to all processes.

    Args:
      decide: makes the plan; called in the first process only.

    Raises:
      ValueError: in all processes, if `decide` raises it.
      RuntimeError: in all processes but the first, if `decide` raises any other error. The first process raises that error.
    """
    said: dict[str, str] = {}
    failed: BaseException | None = None
    if is_first():
        try:
            said = {"plan": decide().to_json()}
        except BaseException as error:  # of any kind: the others must not wait for ever
            failed = error
            said = {"refused": str(error)} if isinstance(error, ValueError) else {"failed": repr(error)}
    said = json.loads(_from_the_first(json.dumps(said).encode()))
    if failed is not None:
        raise failed
    if "refused" in said:
        raise ValueError(said["refused"])
    if "failed" in said:
        raise RuntimeError(f"planning failed in process 0: {said['failed']}")
    return StepPlan.from_json(said["plan"])


def _from_the_first(content: bytes) -> bytes:
    """What the first process gives, in all processes. They have to know its length before."""
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    padded = np.zeros(count, np.uint8)
    if is_first():
        padded[:] = np.frombuffer(content, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes()
