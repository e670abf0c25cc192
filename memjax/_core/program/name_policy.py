"""Policies of `jax.checkpoint` by names: which values to save or to offload, the rest is computed again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from memjax._core import check


@dataclass(frozen=True)
class NamePolicy:
    """What to keep of a checkpointed function: made by `save` and `offload`, joined with `|`.

    Also a policy for `jax.checkpoint` and `flax.nnx.remat`, which do not check the names.
    Equal policies are equal objects to JAX's trace caches too.

    Raises:
      ValueError: a name is both saved and offloaded.
    """

    saved: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("saved", "offloaded"):
            names = getattr(self, name)
            if not isinstance(names, frozenset) or not all(isinstance(value, str) for value in names):
                raise check.fail(TypeError, name, "a frozenset of names", names, "policies.save and offload make one")
        if both := self.saved & self.offloaded:
            raise ValueError(f"names must be saved or offloaded, got {sorted(both)} for both: choose one for each")

    @property
    def names(self) -> frozenset[str]:
        """All names that the policy keeps, on the device or on the host."""
        return self.saved | self.offloaded

    def __or__(self, other: NamePolicy) -> NamePolicy:
        if not isinstance(other, NamePolicy):
            return NotImplemented
        return NamePolicy(self.saved | other.saved, self.offloaded | other.offloaded)

    def to_jax(self) -> Callable[..., Any]:
        """The equivalent member of `jax.checkpoint_policies`."""
        return _to_jax(self)

    def __call__(self, prim, *args, **params):
        return _to_jax(self)(prim, *args, **params)


# JAX compares its policies by identity: one object per policy keeps its trace caches working.
@functools.cache
def _to_jax(policy: NamePolicy) -> Callable[..., Any]:
    if not policy.offloaded:
        return jax.checkpoint_policies.save_only_these_names(*sorted(policy.saved))
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(policy.saved),
        names_which_can_be_offloaded=sorted(policy.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
