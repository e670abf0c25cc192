"""Time by the clock."""

import time
from collections.abc import Callable
from typing import Any

import jax


def seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """How long one call takes until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - start
