"""What a loop keeps moved to the memory of the host and back.

A turn waits for its copies, in both passes. They could run beside what it computes; on an H200 with JAX 0.11.2 they did not:
moving 1,344 MiB out and back added 40 ms to a step, 960 MiB 29 ms, which is all that the link takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core.program import costs
from memjax._core.program.costs import array_bytes
from memjax._plan.solve.segment import Option


def with_moves(found: Sequence[Option], rates: costs.Device) -> list[Option]:
    """The options for the body of a loop, and those in which the largest of what they keep lies on the host.

    Of these none takes more bytes, working memory and seconds than another.
    """
    every = []
    for option in found:
        largest = sorted(filter(lambda var: _is_worth_a_copy(var, rates), option.kept), key=array_bytes, reverse=True)
        for count in range(1, len(largest) + 1):
            moved = largest[:count]
            nbytes = sum(map(array_bytes, moved))
            every.append(
                option._replace(
                    kept=tuple(var for var in option.kept if var not in moved),
                    moved=tuple(moved),
                    nbytes=option.nbytes - nbytes,
                    seconds=option.seconds + costs.moving_seconds(nbytes, rates),
                )
            )
    best: list[Option] = []
    for option in sorted([*found, *every], key=lambda option: (option.nbytes, option.seconds, option.working)):
        if not any(one.seconds <= option.seconds and one.working <= option.working for one in best):
            best.append(option)
    return best


def _is_worth_a_copy(var: Any, rates: costs.Device) -> bool:
    is_key = jnp.issubdtype(var.aval.dtype, jax.dtypes.extended)
    return not is_key and array_bytes(var) > rates.start * rates.link
