"""Puts state of a step into the memory of the host between steps, as much as is needed for the step to fit its device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from memjax._core.check import readable_bytes
from memjax._core.compat import is_tracer, on_host, type_on_host
from memjax._core.meshes import devices_of, own_sharding
from memjax._core.program import costs
from memjax._jit.account import BudgetError
from memjax._jit.call import Call, Step
from memjax._jit.derivatives.acting import MAKE_ONE
from memjax._jit.host.program import with_moves
from memjax._jit.host.state import state_of
from memjax._jit.step_plan import StepPlan

_TRIES = 3  # of how much lies on the host; the last one is of all


def with_state_on_host(call: Call, device: Any, room: int | str, search: Callable[[Call, int | str], Any]) -> Any:
    """What a search for a plan finds, with as much state on the host as is needed for that, or for "min" all of it.

    Args:
      call: the step.
      device: one that it runs on.
      room: bytes of a device, a share of what the step holds, or "min".
      search: finds an entry for a step and bytes of a device, or raises a `BudgetError`.
    """
    refused = None
    if room != "min":
        try:
            return search(call, room)
        except BudgetError as error:
            refused = error
    state, why_not = _movable(call, device)
    if why_not is not None:
        if refused is None:
            return search(call, room)
        least = dataclasses.replace(refused.least, notes=(*refused.least.notes, why_not))
        raise BudgetError(f"{refused}\nnote: {why_not}", least)
    sizes = _sizes(call, state)
    if refused is None:
        return _noted(search(_with_state(call, state, state, device), room), sizes, None, device)
    least, chosen = refused.least, list[int]()
    budget, needed = least.budget, 0
    for last in [False] * (_TRIES - 1) + [True]:
        needed += least.nbytes - budget
        chosen = [*sizes] if last else _first(sizes, needed, len(chosen) + 1)
        try:
            found = search(_with_state(call, state, chosen, device), budget)
            return _noted(found, {k: sizes[k] for k in chosen}, refused.least, device)
        except BudgetError as error:
            least = error.least
            if len(chosen) == len(sizes):
                raise error if least.nbytes < refused.least.nbytes else refused from None
    raise AssertionError("the last try is of all")


def on_host_by(call: Call, numbers: Collection[int], device: Any) -> Call:
    """The step with the state on the host that a plan has there."""
    state, why_not = _movable(call, device)
    if not state.keys() >= {*numbers}:
        what = f"state on the host that cannot be there ({why_not or 'this step has other state'})"
        raise ValueError(f"plan must be of this step, got one with {what}: {MAKE_ONE}")
    return _with_state(call, state, numbers, device)


def _movable(call: Call, device: Any) -> tuple[dict[int, int], str | None]:
    """The state of a step that can lie on the host, as `state_of` gives it, and why there is none, for people."""
    every = state_of(call.traced.jaxpr, call.donated)
    places = _places(call, every, device)
    if every and not places:
        return {}, "offload: state stays on its devices, beside which JAX tells no pinned memory of the host"
    if not every:
        needs = "donated arguments (donate_argnums) of which it returns new values, and that no derivative reads"
        return {}, f"offload: the step has no state that could lie on the host: {needs}"
    return {k: i for k, i in every.items() if k in places}, None


def _places(call: Call, numbers: Iterable[int], device: Any) -> dict[int, Any]:
    """The shardings on the host of leaves; without those of which it is not known where they lie, or beside no such memory."""
    told = _options_by_leaf(call).get("in_shardings", {})
    is_one = len(devices_of(list(map(own_sharding, call.leaves)))) == 1
    usual = SingleDeviceSharding(device) if is_one else None
    lie = {k: told.get(k) or own_sharding(call.leaves[k]) or usual for k in numbers}
    found = {k: on_host(one) for k, one in lie.items() if isinstance(one, Sharding)}
    return {k: place for k, place in found.items() if place is not None}


def _sizes(call: Call, state: Iterable[int]) -> dict[int, int]:
    """Bytes of a device's part of leaves."""
    return {k: _bytes(call.leaves[k]) for k in state}


def _bytes(leaf: Any) -> int:
    sharding = own_sharding(leaf)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _first(sizes: Mapping[int, int], needed: int, least: int) -> list[int]:
    """The first of them that are so many bytes together, and at least so many of them."""
    before = itertools.accumulate(sizes.values(), initial=0)
    return [k for i, (k, sum_before) in enumerate(zip(sizes, before, strict=False)) if sum_before < needed or i < least]


def _with_state(call: Call, state: Mapping[int, int], numbers: Iterable[int], device: Any) -> Call:
    """The step with some of its state on the host."""
    some = {k: state[k] for k in numbers}
    options = dict(call.step.options)
    for name, by_leaf in _options_by_leaf(call).items():
        ours = some.keys() if name == "in_shardings" else {*some.values()}
        tree = _tree(call, name)
        hosts = [on_host(one) if one and i in ours else one for i, one in by_leaf.items()]
        options[name] = jax.tree.unflatten(jax.tree.structure(tree), hosts)
    types = {}
    for k, place in _places(call, some, device).items():
        leaf = call.leaves[k]
        types[k] = type_on_host(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), place)
    moved, out_tree = with_moves(call.traced.jaxpr, some), jax.tree.structure(call.traced.out_info)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_tracer(leaf)]  # the others are static
        return jax.tree.unflatten(out_tree, moved(given))

    return call.with_leaves(types, Step(call.step.f, call.step.graph, options, run))


def _options_by_leaf(call: Call) -> dict[str, dict[int, Any]]:
    """The shardings of leaves of arguments and results that `jax.jit` is given, by number."""
    given = {name: call.step.options.get(name) for name in ("in_shardings", "out_shardings")}
    found = {}
    for name, prefix in given.items():
        if prefix is not None:
            full = jax.tree.broadcast(prefix, _tree(call, name), is_leaf=lambda one: one is None)
            found[name] = dict(enumerate(jax.tree.leaves(full, is_leaf=lambda one: one is None)))
    return found


def _tree(call: Call, name: str) -> Any:
    """What the shardings are of: positional arguments that are not static, or results."""
    return call.step.statics.split(call.args, call.kwargs)[1] if name == "in_shardings" else call.traced.out_info


def _noted(entry: Any, sizes: Mapping[int, int], refused: StepPlan | None, device: Any) -> Any:
    """The entry, in whose plan it says what lies on the host and what that costs.

    Args:
      entry: of the step with its state there.
      sizes: of that state, by number.
      refused: a plan with nothing there; None: there is none, and the step as it is written is predicted.
    """
    nbytes, rates, plan = sum(sizes.values()), costs.device(device), entry.plan
    seconds = costs.moving_seconds(nbytes, rates)
    if refused is None:
        more = nbytes if rates.platform == "cpu" else 0  # others have a copy of it on the device
        plain = dataclasses.replace(plan, plain_nbytes=plan.plain_nbytes + more, plain_is_predicted=True)
        plain = dataclasses.replace(plain, plain_seconds=max(plan.plain_seconds - seconds, 0))
    else:
        names = "plain_nbytes", "plain_is_predicted", "plain_seconds"
        plain = dataclasses.replace(plan, **{name: getattr(refused, name) for name in names})
    note = (
        f"offload: {readable_bytes(nbytes)} of state lie in the host's pinned memory between steps, and come back so. To move "
        f"them there and back takes about {seconds:.2g} s a step at {rates.link / 1e9:.0f} GB/s; where updates run in "
        "loops, a GPU does so while it computes"
    )
    entry.plan = dataclasses.replace(plain, on_host=tuple(sizes), host_nbytes=nbytes, notes=(*plan.notes, note))
    return entry
