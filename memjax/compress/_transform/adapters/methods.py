"""Which methods of a module are compressed: its call, and what else may be called from outside."""

from __future__ import annotations


def methods_of(cls: type, base: type) -> list[str]:
    """The names of `__call__` and of the public methods that `cls` has beside those of `base`."""
    members: dict[str, object] = {}
    for parent in reversed(cls.__mro__):
        if parent not in base.__mro__:
            members.update(vars(parent))
    return [name for name, member in members.items() if name == "__call__" or _is_public_method(name, member)]


def _is_public_method(name: str, member: object) -> bool:
    if name.startswith("_") or isinstance(member, type | staticmethod):
        return False
    return callable(member) and hasattr(member, "__get__")
