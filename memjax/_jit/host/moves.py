"""Arguments of a step that are moved to another memory before it: state to the host, or what came from there to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from memjax._core.lists import Arrays
from memjax._core.meshes import is_in_host_memory, own_sharding
from memjax._jit.call import Call, Step


class Move(NamedTuple):
    """A leaf of the arguments that is moved before the step.

    Attributes:
      to: the sharding that it has then.
      donated: whether the step may have the memory where it was.
    """

    to: Any
    donated: bool


def is_at(leaf: Any, move: Move) -> bool:
    """Whether it is there. Compiled programs may write the sharding of their results in another way."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and (sharding == move.to or sharding.is_equivalent_to(move.to, leaf.ndim))


def moved(leaves: Arrays, moves: Mapping[int, Move]) -> Arrays:
    """The leaves, moved. What is donated exists in one memory at a time but for one array."""
    leaves = [*leaves]
    for k, move in moves.items():
        if not is_at(leaf := leaves[k], move):
            leaves[k] = jax.device_put(leaf, move.to)
            if move.donated and isinstance(leaf, jax.Array):
                jax.block_until_ready(leaves[k])
                leaf.delete()
    return leaves


def moves_of(call: Call) -> dict[int, Move]:
    """What is moved before a step, as the caller has it in another memory."""
    donated = call.donated
    return {k: Move(call.leaves[k].sharding, k in donated) for k in call.elsewhere}


def kind_anywhere(leaf: Any) -> Any:
    """Equal for leaves of arguments that one compiled program takes once they are moved."""
    sharding = getattr(leaf, "sharding", None)
    kind = type(leaf) if sharding is None else _on_device(sharding)
    return getattr(leaf, "shape", None), getattr(leaf, "dtype", None), getattr(leaf, "weak_type", False), kind


def with_state_on_device(step: Step, args: tuple, kwargs: dict[str, Any], leaves: Arrays) -> Call | None:
    """The step for leaves of which those on the host are moved to a device; None if there are none."""
    others = {i: type_on_device(leaf) for i, leaf in enumerate(leaves) if is_in_host_memory(own_sharding(leaf))}
    return Call(step, args, kwargs, leaves, None).with_leaves(others) if others else None


def type_on_device(leaf: Any) -> Any:
    """The type on a device of what lies on the host; all else as it is."""
    if not is_in_host_memory(own_sharding(leaf)):
        return leaf
    sharding = _on_device(leaf.sharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type, sharding=sharding)


def _on_device(sharding: Any) -> Any:
    """The sharding of the same parts in the memories of devices."""
    if not is_in_host_memory(sharding):
        return sharding
    return sharding.with_memory_kind(next(iter(sharding.device_set)).default_memory().kind)
