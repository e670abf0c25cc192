"""Why a transform keeps an array, or does not, recorded for `memjax.explain` while it traces."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.ad_checkpoint import checkpoint_name

_PREFIX = "memjax, kept: "


@dataclasses.dataclass
class Said:
    """What transforms report: which arrays they dropped, and notes about themselves."""

    dropped: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


_said: contextvars.ContextVar[Said | None] = contextvars.ContextVar("said", default=None)


@contextlib.contextmanager
def asked_for_reasons() -> Iterator[Said]:
    """Context manager. Transforms traced in it record why they keep an array, as a name in the trace.

    In the `Said` that it yields, they record which arrays they dropped, and notes.
    """
    said = Said()
    token = _said.set(said)
    try:
        yield said
    finally:
        _said.reset(token)


def asked() -> Said | None:
    """Where to record something; None outside of `asked_for_reasons`."""
    return _said.get()


def with_reason(value: Any, reason: str) -> Any:
    """The value, within `asked_for_reasons` with a name that states why it is kept."""
    return checkpoint_name(value, _PREFIX + reason) if asked() is not None and reason else value


def reason_of(eqn: Any) -> str:
    """The reason in a name that `with_reason` gave; "" for all other equations."""
    name = eqn.params.get("name", "") if eqn.primitive.name == "name" else ""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else ""
