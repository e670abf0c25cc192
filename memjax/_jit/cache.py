"""What the next process need not do again, on disk: plans of steps, and the steps that were compiled by them.

The name of a plan is a hash of the step's equations. A compiled step also has constants in it and runs on certain devices. Its
name is a hash of the plan and of the step's whole module, as in JAX's compilation cache.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pickle
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from memjax._core.compat import is_described, is_tracer
from memjax._jit.step_plan import StepPlan
from memjax._plan.budget.digest import digest_of

_HIT = "/jax/compilation_cache/cache_hits"


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
    if where is not None and name is not None:
        _write(where / f"{name}.json", plan.to_json().encode())


def name_of_program(lowered: Any, device: Any, *asked: Any) -> str | None:
    """A name for the step that is compiled by the plan for a step that is lowered as it is written.

    None for a step that may call back into this process: the next process would not be called. None for devices that are not
    there: nothing is tuned for them.

    Args:
      lowered: a `jax.stages.Lowered`.
      device: one that it runs on.
      *asked: the plan, and what it was made for: types of arguments, and options. Shardings among them tell devices.
    """
    if is_described(device):
        return None
    module = lowered.as_text()
    if "callback" in module:
        return None
    set_here = [(name, str(value)) for name, value in sorted(jax.config.values.items()) if "cache" not in name]
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    machine = (platform.node(), platform.machine()) if device.platform == "cpu" else ()
    places = [_ids(one) for one in jax.tree.leaves(asked, is_leaf=_is_sharding) if _is_sharding(one)]
    text = repr(
        (_own_code(), device.device_kind, device.client.platform_version, machine, set_here, flags, asked, places)
    )
    return hashlib.sha256((module + text).encode()).hexdigest()[:32]


def _is_sharding(value: Any) -> bool:
    return isinstance(value, jax.sharding.Sharding)


def _ids(sharding: Any) -> list[int]:
    """Numbers of devices, in order."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return [device.id for device in sharding.mesh.devices.flat]
    return sorted(device.id for device in sharding.device_set)


@functools.cache
def _own_code() -> str:
    """A hash of memjax's source: the same plan may be run in another way by another version, or by one that is being edited."""
    found = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def load_program(where: Path, name: str | None, device: Any, lowered: Any) -> Any | None:
    """The compiled step of that name, if there is one that can be loaded."""
    try:
        ids, serialized = pickle.loads((where / f"{name}.program").read_bytes())
        by_id = {one.id: one for one in device.client.devices()}
        return serialize_executable.deserialize_and_load(
            serialized, lowered.in_tree, lowered.out_tree, device.client, execution_devices=[by_id[i] for i in ids]
        )
    except Exception:  # of any kind: an executable of another driver, a file that is cut off
        return None


@functools.cache
def _hits() -> list[str]:
    """An entry for each program that JAX has found in its compilation cache, from the first call on."""
    found: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: found.append(event) if event == _HIT else None)
    return found


def found_in_jax_cache() -> int:
    """How many programs JAX has found in its compilation cache, from the first call on."""
    return len(_hits())


def save_program(where: Path, name: str | None, program: Any) -> None:
    """Keeps a compiled step, if it can be kept. On CPUs one that was loaded cannot: what would be written does not run."""
    if name is None:
        return
    try:
        [ids] = {tuple(_ids(sharding)) for sharding in jax.tree.leaves(program.input_shardings)}
        serialized, _, _ = serialize_executable.serialize(program)
    except Exception:  # of any kind: it may hold what has no other form than in this process
        return
    _write(where / f"{name}.program", pickle.dumps((ids, serialized)))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
