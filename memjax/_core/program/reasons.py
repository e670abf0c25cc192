"""Records, during tracing, why a transform keeps arrays, and which it drops; `memjax.explain` shows this."""

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
    """The reports of transforms: the arrays that they dropped, and notes."""

    dropped: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


_said: contextvars.ContextVar[Said | None] = contextvars.ContextVar("said", default=None)


@contextlib.contextmanager
def asked_for_reasons() -> Iterator[Said]:
    """Context manager. Transforms traced in it record why they keep an array, as a name in the trace.

    In the `Said` that it yields, they record dropped arrays and notes.
    """
    said = Said()
    token = _said.set(said)
    try:
        yield said
    finally:
        _said.reset(token)


def asked() -> Said | None:
    """The `Said` to record in; None outside of `asked_for_reasons`."""
    return _said.get()


def with_reason(value: Any, reason: str) -> Any:
    """Names the value by the reason why it is kept. Outside of `asked_for_reasons`, returns it unchanged."""
    return checkpoint_name(value, _PREFIX + reason) if asked() is not None and reason else value


def reason_of(eqn: Any) -> str:
    """The reason that `with_reason` recorded in this equation; "" if it recorded none."""
    name = eqn.params.get("name", "") if eqn.primitive.name == "name" else ""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else ""
