"""Why a transform keeps an array, or does not, told to `memjax.explain` while it traces."""

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
    """What transforms say of arrays that they do not keep, and of themselves."""

    dropped: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


_said: contextvars.ContextVar[Said | None] = contextvars.ContextVar("said", default=None)


@contextlib.contextmanager
def asked_for_reasons() -> Iterator[Said]:
    """Transforms that are traced inside say why."""
    said = Said()
    token = _said.set(said)
    try:
        yield said
    finally:
        _said.reset(token)


def asked() -> Said | None:
    """Where to say something, if somebody wants to know."""
    return _said.get()


def with_reason(value: Any, reason: str) -> Any:
    """The value, with a name that says why it is kept, if somebody wants to know."""
    return checkpoint_name(value, _PREFIX + reason) if asked() is not None and reason else value


def reason_of(eqn: Any) -> str:
    """The reason in a name that `with_reason` gave; "" for all other equations."""
    name = eqn.params.get("name", "") if eqn.primitive.name == "name" else ""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else ""
