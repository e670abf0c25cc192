"""How long calls take."""

import time
from collections.abc import Callable
from typing import Any

import jax


def seconds(run: Callable[..., Any], *arguments: Any, calls: int = 1) -> float:
    """How long one call takes, from several in a row, until the results of the last are there."""
    start = time.perf_counter()
    for _ in range(calls):
        out = run(*arguments)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls
