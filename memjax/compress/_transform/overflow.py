"""Warns at run time of codes that overflow: their values are lost, and gradients are NaN."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class CapacityWarning(UserWarning):
    """Codes of `memjax.compressed` needed more bits than the codec's `bits_per_value`."""


_warned: set[tuple[str, ...]] = set()


def warn_of_overflow(names: Sequence[str], codes: Sequence[Any]) -> None:
    """Have the host issue a `CapacityWarning`, once for these arrays, when one of `codes` overflows.

    A device that finds no overflow does not call the host.

    Args:
      names: of the arrays, for the message.
      codes: the arrays' codes; those without `overflowed` and `needed_bits_per_value` are skipped.
    """
    pairs = [(name, code) for name, code in zip(names, codes, strict=True) if hasattr(code, "overflowed")]
    if not pairs:
        return
    arrays = tuple(name for name, _ in pairs)

    def tell(overflowed, needed):
        if np.any(overflowed) and arrays not in _warned:
            _warned.add(arrays)
            warnings.warn(_message(arrays, np.asarray(overflowed), np.asarray(needed)), CapacityWarning, stacklevel=2)

    @jax.custom_batching.custom_vmap
    def look(overflowed, needed):
        jax.lax.cond(jnp.any(overflowed), lambda: jax.debug.callback(tell, overflowed, needed), lambda: None)
        return overflowed

    @look.def_vmap
    def look_once(size, batched, overflowed, needed):  # a callback would be repeated for every example
        overflowed = jnp.any(overflowed, 0) if batched[0] else overflowed
        return look(overflowed, jnp.max(needed, 0) if batched[1] else needed), False

    look(
        jnp.stack([code.overflowed for _, code in pairs]),
        jnp.stack([code.needed_bits_per_value for _, code in pairs]),
    )


def _message(names: Sequence[str], overflowed: np.ndarray, needed: np.ndarray) -> str:
    worst = sorted(map(int, np.flatnonzero(overflowed)), key=lambda i: -needed[i])
    listed = ", ".join(f"{names[i]} ({_up(needed[i])} bits)" for i in worst[:5])
    more = f" and {len(worst) - 5} more" if len(worst) > 5 else ""
    enough = _up(needed[worst[0]])
    return (
        f"memjax.compressed: the codes of {len(worst)} of {len(names)} saved arrays need more than bits_per_value: "
        f"{listed}{more}. Their values are lost, and gradients computed from them are NaN. Give a codec with "
        f"bits_per_value={enough} or more or a larger bound, use memjax.compress.transactional, which repeats such steps "
        f"with more capacity, or leave the codec out: the default cannot overflow."
    )


def _up(bits: float) -> float:
    """The number rounded up to a tenth."""
    return math.ceil(float(bits) * 10) / 10
