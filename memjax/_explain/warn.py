"""What costs people days: checkpoints that do nothing, copies that nobody asked for, logits."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from memjax._core.check import readable_bytes
from memjax._core.compat import bodies, name_stack, parameters, primitive_name
from memjax._core.program.dataflow import made_by, read_by, variables
from memjax._core.program.jaxpr import nbytes
from memjax._core.program.primitives import CHECKPOINTS, NAMES
from memjax._core.program.scopes import Paths
from memjax._explain.kept import Group, Kept
from memjax._explain.logits import Logits

_SHARE = 0.02
_UNROLLED = 8
_SMALL = 1 << 10
_LARGER = {"broadcast_in_dim": "repeated", "pad": "padded"}


def warnings_of(
    programs: Sequence[Any], groups: Sequence[Group], logits: Sequence[Logits], paths: Paths, residual_bytes: int
) -> tuple[str, ...]:
    """All warnings, those of checkpoints first. `programs` are the function's own, and the one with a backward pass."""
    large = [group for group in groups if group.nbytes >= _SHARE * residual_bytes]
    found = [
        *_unmatched(programs),
        *_useless([array for group in groups for array in group.arrays], paths),
        *_copies(large),
        *_logits(large, logits),
        *_unrolled(groups, residual_bytes),
    ]
    return tuple(dict.fromkeys(found))


def _all(jaxpr: Any, outer: tuple = ()) -> Iterator[tuple]:
    """Each equation as a tuple: the equations around it, the outermost first, then itself."""
    for eqn in jaxpr.eqns:
        yield (*outer, eqn)
        for body in bodies(eqn):
            yield from _all(body, (*outer, eqn))


def _unmatched(programs: Sequence[Any]) -> Iterator[str]:
    """Names in policies that no value has."""
    wanted: set[str] = set()
    present: set[str] = set()
    for program in programs:
        for place in _all(program.jaxpr):
            eqn = place[-1]
            if primitive_name(eqn) in CHECKPOINTS:
                wanted |= _names(parameters(eqn).get("policy"))
            if primitive_name(eqn) in NAMES:
                held = eqn.params.get("_prim", None)
                present.add(held.name if held is not None else eqn.params["name"])
    for name in sorted(wanted - present):
        near = difflib.get_close_matches(name, present, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        there = f"the names are {sorted(present)}" if present else "no value has a name"
        yield (
            f"a checkpoint's policy names {name!r}, but nothing is called so{hint}: {there}. "
            "Name the value with jax.ad_checkpoint.checkpoint_name."
        )


def _names(policy: Any, depth: int = 4) -> set[str]:
    """The names that a policy was made with: in its attributes, or in what its function closes over."""
    if isinstance(policy, set | frozenset | list | tuple):
        return {name for item in policy for name in ([item] if isinstance(item, str) else _names(item, depth - 1))}
    if policy is None or depth == 0:
        return set()
    cells = [cell.cell_contents for cell in getattr(policy, "__closure__", None) or ()]
    cells += list(getattr(policy, "__dict__", {}).values())
    return {name for cell in cells if not isinstance(cell, str) for name in _names(cell, depth - 1)}


def _useless(arrays: Sequence[Kept], paths: Paths) -> Iterator[str]:
    """Checkpoints that keep as much, only to recompute something, as that would take."""
    places = {
        id(eqn): reader[: index + 1]
        for array in arrays
        for reader in array.readers
        for index, eqn in enumerate(reader)
        if primitive_name(eqn) in CHECKPOINTS
    }
    for place in places.values():
        eqn = place[-1]
        body = bodies(eqn)[0]
        recomputed = made_by(inner for inner in body.eqns if _is_recomputed((inner,)))
        late = read_by(inner for inner in body.eqns if not _is_recomputed((inner,)))
        instead = sum(nbytes(var.aval) for var in recomputed if var in late) // arrays[0].value.devices
        only_for_this = lambda reader, eqn=eqn: any(part is eqn for part in reader) and _is_recomputed(reader)
        kept = sum(array.value.nbytes for array in arrays if all(map(only_for_this, array.readers)))
        where = _around([paths.of((*place, inner)) for inner in body.eqns]) or paths.of(place)
        if not recomputed:
            yield (
                f"the checkpoint round {where} computes nothing again: its policy keeps everything that "
                "the backward pass reads. Without it the program is the same."
            )
        elif instead <= kept and kept >= _SMALL:
            yield (
                f"the checkpoint round {where} keeps {readable_bytes(kept)} to compute {readable_bytes(instead)} "
                "again: it saves nothing. Put it round more."
            )


def _around(paths: Sequence[str]) -> str:
    """The path of what all these are in."""
    columns = itertools.takewhile(
        lambda column: len(set(column)) == 1, zip(*(path.split("/") for path in paths), strict=False)
    )
    return "/".join(column[0] for column in columns)


def _is_recomputed(place: Sequence[Any]) -> bool:
    return any("rematted_computation" in name_stack(eqn) for eqn in place)


def _copies(groups: Sequence[Group]) -> Iterator[str]:
    """Warnings of copies that are kept though they are larger than what they copy: of a wider dtype, or with more elements."""
    for group in groups:
        place = group.arrays[0].place
        eqn, aval = place[-1], group.arrays[0].value.aval
        name = primitive_name(eqn)
        before = eqn.invars[0].aval if variables(eqn.invars[:1]) else None
        if before is None or not hasattr(before, "dtype"):
            continue
        size = f"{readable_bytes(group.nbytes)} at {group.source}, in {group.path}"
        if name == "convert_element_type" and _is_wider(aval.dtype, before.dtype):
            yield (
                f"{size}: kept as {aval.dtype}, though it is a copy of {before.dtype}. "
                f"Keep the {before.dtype}, and convert where it is used."
            )
        elif name in _LARGER and aval.size > before.size > 1:
            yield (
                f"{size}: kept as {list(aval.shape)}, {_LARGER[name]} from {list(before.shape)}. "
                "Keep the smaller, and do this where it is used."
            )


def _is_wider(new: Any, old: Any) -> bool:
    floating = jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating)
    return floating and jnp.dtype(new).itemsize > jnp.dtype(old).itemsize


def _logits(groups: Sequence[Group], logits: Sequence[Logits]) -> Iterator[str]:
    for one in logits:
        held = sum(array.nbytes for group in groups for array in group.arrays if one.holds(array))
        if held:
            yield (
                f"logits of shape {list(one.shape)} are kept: {readable_bytes(held)}. "
                "memjax.linear_cross_entropy has the same loss without them."
            )


def _unrolled(groups: Sequence[Group], residual_bytes: int) -> Iterator[str]:
    """Many layers of the same shapes, each a part of the program of its own."""
    layers: dict[str, int] = {}
    for group in groups:
        numbers = [part for part in group.path.split("/") if ".." in part]
        times = sum(array.forward.iterations == 1 for array in group.arrays)
        if times >= _UNROLLED and times == len(group.arrays):
            where = group.path.split(numbers[0])[0] + numbers[0] if numbers else group.path
            layers[where] = layers.get(where, 0) + group.nbytes
    for where, held in layers.items():
        if held > residual_bytes / 2:
            yield (
                f"{where} is unrolled: jax.lax.scan (nn.scan, nnx.scan) over stacked parameters compiles one layer, and "
                "with jax.checkpoint in its body frees what a layer computes again."
            )
