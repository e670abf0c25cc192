"""Flat lists of arrays, split by a mask and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Arrays = list[Any]


def pick(values: Sequence[Any], mask: Sequence[bool]) -> Arrays:
    """The values where `mask` is true."""
    return [value for value, chosen in zip(values, mask, strict=True) if chosen]


def drop(values: Sequence[Any], mask: Sequence[bool]) -> Arrays:
    """The values where `mask` is false."""
    return [value for value, chosen in zip(values, mask, strict=True) if not chosen]


def spread(values: Sequence[Any], mask: Sequence[bool]) -> Arrays:
    """The values where `mask` is true, None elsewhere."""
    remaining = iter(values)
    return [next(remaining) if chosen else None for chosen in mask]


def merge(chosen: Sequence[Any], others: Sequence[Any], mask: Sequence[bool]) -> Arrays:
    """The list of which `pick` gave `chosen` and `drop` gave `others`."""
    chosen_iter, other_iter = iter(chosen), iter(others)
    return [next(chosen_iter if is_chosen else other_iter) for is_chosen in mask]
