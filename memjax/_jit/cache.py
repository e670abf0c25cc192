"""Plans of steps on disk, so that the next process compiles once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from memjax._core.compat import is_tracer
from memjax._jit.step_plan import StepPlan
from memjax._plan.budget.digest import digest_of


def directory(given: str | os.PathLike | None) -> Path | None:
    """Where plans are kept: `given`, or beside what JAX's compilation cache keeps; None: nowhere."""
    if given is not None:
        return Path(given)
    beside = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return None if not beside or "://" in beside else Path(beside) / "memjax"


def name_of(closed: Any, kinds: Sequence[Any], device: Any, *asked: Any) -> str | None:
    """A name for the plan of a traced step; None for one that closes over values of another trace.

    Args:
      closed: the step.
      kinds: types and shardings of its arguments.
      device: one that it runs on.
      *asked: the budget, what is allowed, and the options.
    """
    if any(map(is_tracer, closed.consts)):
        return None
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    text = digest_of(closed.jaxpr, *kinds, device.device_kind, *versions, *asked)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(where: Path | None, name: str | None) -> StepPlan | None:
    """The plan of that name, if there is one that can be read."""
    if where is None or name is None:
        return None
    try:
        return StepPlan.from_json((where / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None


def save(where: Path | None, name: str | None, plan: StepPlan) -> None:
    """Keeps a plan. Another process may do so at the same time."""
    if where is None or name is None:
        return
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=where, suffix=".part", delete=False) as file:
        file.write(plan.to_json())
    os.replace(file.name, where / f"{name}.json")
