"""What to say where no plan fits: where the memory of a step goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from memjax._core.arrays import is_on_host
from memjax._core.check import readable_bytes
from memjax._core.program.jaxpr import nbytes
from memjax._core.program.scopes import Paths
from memjax._explain.peak import alive_at_peak
from memjax._jit.candidates import fixed_bytes
from memjax._jit.step_plan import StepPlan
from memjax._plan.memory.layout import Layout, local_bytes

_ROWS, _ROWS_AT_PEAK = 6, 4


class BudgetError(ValueError):
    """A budget is less than the least possible. It has the account, and the plan that takes the least."""

    def __init__(self, message: str, least: StepPlan):
        super().__init__(message)
        self.least = least


def account(
    least: StepPlan,
    program: Any,
    traced: Any,
    f: Any,
    *,
    nothing_to_plan: bool = False,
    not_searched: bool = False,
) -> str:
    """The message for a budget that is less than the least possible.

    Args:
      least: the plan that takes the least.
      program: the step, compiled with it.
      traced: the step as it is written.
      f: its function.
      nothing_to_plan: there is no derivative in it.
      not_searched: arguments and results are more than the budget, so that only one plan was compiled; another may take less.
    """
    found = program.memory_analysis()
    arguments, results = fixed_bytes(program)
    given, possible = readable_bytes(least.budget), readable_bytes(least.nbytes, up=True)
    if given == readable_bytes(least.nbytes):
        given, possible = f"{least.budget:,} B", f"{least.nbytes:,} B"
    if nothing_to_plan:
        head = (
            f"budget is {given}, but the step takes {possible} and has no derivative in it of which less could be kept"
        )
    else:
        time = f", at {least.seconds / least.plain_seconds:.2f} of the predicted time" if least.plain_seconds else ""
        plain = readable_bytes(least.plain_nbytes, up=least.as_written) + " (predicted)" * least.plain_is_predicted
        least_is = "the least possible is"
        if not_searched:
            name, size = (
                ("arguments", arguments) if arguments > least.budget else ("arguments and results", arguments + results)
            )
            least_is = f"the {name} alone take {readable_bytes(size)}, whatever the plan; {least_is} at most"
        head = f"budget is {given}, but {least_is} {possible} of a device{time}; as it is written it takes {plain}"
    rows = [f"arguments: {readable_bytes(arguments)} (whole arrays: {_by_path(traced)})"]
    rows.append(f"results that are no donated arguments: {readable_bytes(results)}{_donation(traced)}")
    rows.append(f"temporaries: {readable_bytes(found.temp_size_in_bytes)}{_at_peak(program, f)}")
    if found.generated_code_size_in_bytes:
        rows.append(f"code: {readable_bytes(found.generated_code_size_in_bytes)}")
    smaller = "" if arguments + results > least.budget else " a smaller batch,"
    hint = f"Give a larger budget,{smaller} a narrower optimizer state, or shard the arguments over more devices"
    longer = "" if nothing_to_plan else '; budget="min" looks longer for the least'
    notes = "".join(f"\nnote: {note}" for note in least.notes)
    return "\n  ".join([head + ":", *rows]) + f"\n{hint}{longer}.{notes}"


def _at_peak(program: Any, f: Any) -> str:
    """The largest temporaries that are alive at one time, by where they are made, as far as the compiler tells."""
    sizes: dict[str, int] = {}
    try:
        alive = alive_at_peak(program, Paths(f))
    except ValueError:
        return ""
    for one in alive:
        sizes[one.name] = sizes.get(one.name, 0) + max(one.bytes, 0)
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_ROWS_AT_PEAK]
    return (
        f" (most at the peak: {', '.join(f'{name} {readable_bytes(size)}' for name, size in largest)})"
        if largest
        else ""
    )


def _by_path(traced: Any) -> str:
    """Bytes of arguments by their path, the largest first, as whole arrays."""
    sizes: dict[str, int] = {}
    for path, info in jax.tree_util.tree_leaves_with_path(traced.args_info):
        named = path[1:2] if len(path) > 2 and isinstance(path[2], jax.tree_util.SequenceKey) else path[1:3]
        name = jax.tree_util.keystr(named, simple=True, separator="/")
        name = f"args[{name}]" if path[0].idx == 0 else name
        sizes[name] = sizes.get(name, 0) + nbytes(info._aval)
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    rows = [f"{name} {readable_bytes(size)}" for name, size in largest[:_ROWS]]
    return ", ".join(rows + ["..."] * (len(largest) > _ROWS))


def beside(traced: Any, layout: Layout) -> tuple[int, int]:
    """Bytes of a device for arguments, and for results that are no donated arguments, about: what no plan changes."""
    closed = traced.jaxpr
    sizes = list(map(local_bytes, closed.in_avals, layout.shardings[len(closed.consts) :]))
    # New parameters, say, are taken to be split over devices as the old ones.
    alike = {type_of(aval): size for aval, size in zip(closed.in_avals, sizes, strict=True)}
    return sum(sizes), bytes_of_results(traced, alike)


def bytes_of_results(traced: Any, local: Mapping[Any, int] | None = None, *, all_donated: bool = False) -> int:
    """Bytes of results that are no donated arguments.

    Args:
      traced: the step.
      local: by type, bytes of a device's part of such a result, see `type_of`. Others count as whole arrays.
      all_donated: as if all arguments were donated.
    """
    local = local or {}
    avals = traced.jaxpr.out_avals
    donated = donated_results(traced, all_donated=all_donated)
    return sum(local.get(type_of(aval), nbytes(aval)) for i, aval in enumerate(avals) if i not in donated)


def type_of(aval: Any) -> Any:
    """What results have in common with arguments in whose memory they can lie."""
    return aval.shape, aval.dtype, is_on_host(aval)


def donated_results(traced: Any, *, all_donated: bool = False) -> dict[int, int]:
    """By number of a result that lies in a donated argument the number of that: of each type the first ones, in order."""
    given: dict[Any, list[int]] = {}
    for k, info in enumerate(jax.tree.leaves(traced.args_info)):
        if info.donated or all_donated:
            given.setdefault(type_of(info._aval), []).append(k)
    lists = {kind: iter(numbers) for kind, numbers in given.items()}
    pairs = ((i, next(lists.get(type_of(aval), iter(())), None)) for i, aval in enumerate(traced.jaxpr.out_avals))
    return {i: k for i, k in pairs if k is not None}


def _donation(traced: Any) -> str:
    """What donating more would give back."""
    saved = bytes_of_results(traced) - bytes_of_results(traced, all_donated=True)
    return f"; donate_argnums would give up to {readable_bytes(saved)} back" if saved > 2**10 else ""
