"""The plan of a step in a few lines: what `print` shows of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memjax._core.check import readable_bytes
from memjax._explain.kept import collapsed, template
from memjax._plan.result import Kept, Plan

_LINES = 15
_MOST = 3  # tiles, derivatives and notes that have a line each


def summary(plan: Any) -> str:
    """A `StepPlan` in at most 15 lines: its bytes, its notes, the largest arrays that it keeps, and where to find the others."""
    lines = [f"StepPlan: {head(plan)}", *(f"note: {note}" for note in _first(plan.notes))]
    if plan.as_written:
        return "\n".join(lines)
    lines += _first([str(one) for one in plan.tiled])
    planned = [one for one in plan.passes if one is not None]
    lines += _first([_of_derivative(one) for one in planned])
    rows, _, nbytes = _rows(planned)
    if not rows:
        return "\n".join(lines)
    shown = rows[: _LINES - len(lines) - 1]
    lines += [f"    {readable_bytes(size):>10}  {text}" for size, text in shown]
    rest = nbytes - sum(size for size, _ in shown)
    left = f"{readable_bytes(rest)} more in {len(rows) - len(shown)} rows; " if len(shown) < len(rows) else ""
    return "\n".join([*lines, f"{left}all of it: plan.passes, plan.to_json()"])


def head(plan: Any) -> str:
    """A `StepPlan` in one line."""
    of = f"{readable_bytes(plan.nbytes)} of {readable_bytes(plan.budget)}, "
    if plan.as_written:
        return f"{of}as it is written"
    more = plan.seconds / plan.plain_seconds - 1 if plan.plain_seconds else 0.0
    predicted = " (predicted)" * plan.plain_is_predicted
    text = f"{of}{readable_bytes(plan.plain_nbytes)} as it is written{predicted}; predicted time {more:+.1%}"
    text += f"; in {plan.microbatches} microbatches" * (plan.microbatches > 1)
    text += "; updates in the loops of backward passes" * plan.updates_in_loops
    text += "; the derivative is taken twice, first for what updates need of all gradients" * plan.two_passes
    text += f"; {readable_bytes(plan.host_nbytes)} of state on the host" * bool(plan.on_host)
    return text + "; ordered by the compiler for the least memory" * plan.ordered_for_memory


def _first(texts: Sequence[str]) -> Iterator[str]:
    """As many texts as have a line each, and how many more there are."""
    yield from texts[:_MOST]
    if len(texts) > _MOST:
        yield f"... and {len(texts) - _MOST} more"


def _of_derivative(plan: Plan) -> str:
    if not plan.stretches:
        return "a derivative: keeps what it keeps as it is written"
    _, arrays, nbytes = _rows([plan])
    parts = len(plan.stretches)
    loops = sum(stretch.turns is not None for stretch in plan.stretches)
    return (
        f"a derivative in {parts} part{'s' * (parts > 1)}{f', {loops} of them loops' if loops else ''}: keeps {arrays} arrays "
        f"of {readable_bytes(nbytes)} and what each part starts from"
        + (f"; {readable_bytes(plan.host_nbytes)} on the host" if plan.host_nbytes else "")
        + ("; large arrays of the backward pass one after another" if plan.in_steps else "")
    )


def _rows(plans: Sequence[Plan]) -> tuple[list[tuple[int, str]], int, int]:
    """What plans keep as rows of bytes and text, the largest first; how many arrays, and bytes of all.

    Arrays of layers that are alike are one row, with their modules as one: "Block[0..5]/mlp".
    """
    alike: dict[tuple[str, ...], list[tuple[int, Kept, str]]] = {}
    for plan in plans:
        for stretch in plan.stretches:
            for kept in stretch.kept:
                kind, _, rest = kept.what.partition(" ")
                made_by, _, place = rest.partition(" ")
                path, _, line = place.partition(", ")
                key = kind, made_by, template(path), line, kept.how
                alike.setdefault(key, []).append((stretch.turns or 1, kept, path))
    rows = []
    for (kind, made_by, _, line, how), some in alike.items():
        where = ", ".join(part for part in (collapsed([path for _, _, path in some]), line) if part)
        times = sum(count for count, _, _ in some)
        many = f"{times} x " if times > 1 else ""
        rows.append((sum(count * one.nbytes for count, one, _ in some), f"{many}{kind} {made_by} {where}{how}"))
    arrays = sum(count for some in alike.values() for count, _, _ in some)
    return sorted(rows, key=lambda row: -row[0]), arrays, sum(size for size, _ in rows)
