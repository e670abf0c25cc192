"""A step for arguments of certain types: as it is written if it fits, or by a plan, compiled as it will run."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from memjax._core import check
from memjax._core.arrays import is_float
from memjax._core.clear_errors import option_errors
from memjax._core.compat import is_described, is_tracer
from memjax._core.meshes import device_of, own_sharding, split_over
from memjax._core.positions.walk import Mixed
from memjax._core.program import costs
from memjax._jit.account import BudgetError, account, beside, donated_results
from memjax._jit.cache import (
    directory,
    found_in_jax_cache,
    load,
    load_program,
    name_of,
    name_of_program,
    save,
    save_program,
)
from memjax._jit.call import Call
from memjax._jit.candidates import DoesNotFitError, fixed_bytes, held_bytes
from memjax._jit.derivatives.acting import MAKE_ONE, acting_by
from memjax._jit.derivatives.body import Acting, Body
from memjax._jit.derivatives.passes import StepPasses
from memjax._jit.host.moves import is_at, moved, moves_of
from memjax._jit.host.place import on_host_by, with_state_on_host
from memjax._jit.processes import are_in_all_processes, compiler_options, plan_of_the_first
from memjax._jit.progress import Progress
from memjax._jit.step_plan import StepPlan, StepPoint
from memjax._jit.updates.in_loop import with_updates_in_loops
from memjax._jit.ways.order import WORTH_IT, ordered_for_memory
from memjax._jit.ways.shapes import with_shapes
from memjax._jit.ways.ways import Ways, note_memory
from memjax._measure import remat_compiler_options
from memjax._plan.batch.examples import batch_of
from memjax._plan.batch.microbatches import in_microbatches
from memjax._plan.memory.layout import Layout
from memjax._plan.tile.passes import TileOn


class Entry:
    """A step for arguments of some types and shardings.

    Args:
      plan: of it.
      program: it, compiled.
      call: it, with its arguments where it has them.
      as_jitted: gives it as a function under `jax.jit`.
      was_loaded: whether JAX has found the program in its cache.
    """

    def __init__(self, plan: StepPlan, program: Any, call: Call, as_jitted: Callable[[], Any], was_loaded: bool):
        self.plan, self.program, self._call, self._as_jitted = plan, program, call, as_jitted
        self.moves, self.was_loaded = moves_of(call), was_loaded

    @functools.cached_property
    def jitted(self) -> Any:
        return self._as_jitted()

    def trace(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The step traced for such arguments, where it has them."""
        return (
            self.jitted.trace(*self._call.args, **self._call.kwargs)
            if self.moves
            else self.jitted.trace(*args, **kwargs)
        )

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The results for arguments that are not static. They are moved first to where the step has them."""
        if self.moves:
            leaves, tree = jax.tree.flatten((args, kwargs))
            args, kwargs = jax.tree.unflatten(tree, moved(leaves, self.moves))
        return self.program(*args, **kwargs)

    def is_in_place(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether nothing is moved first."""
        leaves = jax.tree.leaves((args, kwargs)) if self.moves else []
        return len(leaves) > max(self.moves, default=-1) and all(is_at(leaves[k], self.moves[k]) for k in self.moves)


class Asked(NamedTuple):
    """What a user asks of a plan: see `jit`."""

    budget: int | str
    allow: tuple[str, ...]
    plan: StepPlan | None
    cache_dir: str | os.PathLike | None


def decided(call: Call, asked: Asked) -> Entry:
    """The step for these arguments: as it is written if it fits, or by a plan."""
    planned = _Planned(call)
    if asked.plan is not None:
        return planned.by(asked.plan)
    if not are_in_all_processes(call.leaves):
        return _decided_here(planned, asked)
    found: list[Entry] = []

    def plan() -> StepPlan:
        found.append(_decided_here(planned, asked))
        return found[0].plan

    plan_of_all = plan_of_the_first(plan)
    return found[0] if found else planned.by(plan_of_all)


def _decided_here(planned: _Planned, asked: Asked) -> Entry:
    """The same, decided in this process."""
    kept = _Kept(asked, planned)
    arguments, _ = beside(planned.call.traced, planned.layout)
    room = _room(asked.budget, arguments, planned.device)
    found = kept.entry()
    if found is not None and held_bytes(found.program) <= (found.plan.nbytes if isinstance(room, str) else room):
        return found
    if "offload" in asked.allow:
        search = lambda call, room: _searched(_Planned(call), asked.allow, room)
        found = with_state_on_host(planned.call, planned.device, room, search)
    else:
        found = _searched(planned, asked.allow, room)
    kept.put(found)
    return found


def _searched(planned: _Planned, allow: Sequence[str], room: int | str) -> Entry:
    """The step as it is written if it fits so many bytes, or by the plan that is found."""
    step, traced, layout = planned.call.step, planned.call.traced, planned.layout
    arguments, results = beside(traced, layout)
    progress = Progress(step.name)

    def compile_with(body: Body, acting: Acting) -> Any:
        compiled = planned.compiled(body, acting)
        if acting or body.is_changed:
            progress.compiled(held_bytes(compiled), room, ways.way)
        return compiled

    ways = Ways(traced, allow, layout, planned.device, arguments, results, compile_with, planned.lowered)
    body, fit = ways.body, ways.as_written
    if (share := check.share_of(room)) is not None:
        room = int(share * fit.plain.nbytes)
    limit = room if isinstance(room, int) and room < sys.maxsize else None

    def beside_plain(plan: StepPlan) -> StepPlan:
        """The plan with what is known of the step as it is written."""
        of_plain: dict[str, Any] = {"plain_nbytes": fit.plain_nbytes, "plain_seconds": fit.kept_seconds}
        return dataclasses.replace(plan, **of_plain, plain_is_predicted=not fit.is_plain_compiled, notes=ways.notes)

    if limit is not None and body.has_passes and limit < arguments + results:
        least, program = ways.least_predicted(limit)
        if limit < sum(fixed_bytes(program)):  # arguments that the step does not read are none of them
            least = beside_plain(least)
            raise BudgetError(account(least, program, traced, step.f, not_searched=True), least)
    if limit is None or not body.has_passes or fit.may_fit_plain(limit):
        program, nbytes, predicted, _ = fit.plain
        as_written = StepPlan(nbytes if limit is None else limit, nbytes, nbytes, predicted_nbytes=predicted)
        if not body.has_passes and nbytes > as_written.budget:
            raise BudgetError(account(as_written, program, traced, step.f, nothing_to_plan=True), as_written)
        if not body.has_passes or (isinstance(room, int) and nbytes <= room):
            return planned.entry(as_written, program)
    try:
        chosen, best = ways.fastest(room)
        chosen = beside_plain(chosen)
    except DoesNotFitError as error:
        least = beside_plain(error.plan)
        if (found := planned.ordered_for_memory(least)) is None:
            raise BudgetError(account(least, error.program, traced, step.f), least) from None
        chosen, best = found.plan, found.program
    progress.done(chosen)
    return planned.entry(chosen, best)


def frontier(call: Call, asked: Asked) -> list[StepPoint]:
    """What a step is predicted to hold and to take, by budget: see `Ways.frontier`. Nothing is compiled."""
    return _predicted(call, asked).frontier()


def notes(call: Call, asked: Asked) -> tuple[str, ...]:
    """Which of the ways that are allowed a step does not have, and why. Nothing is compiled."""
    ways = _predicted(call, asked)
    return ways.notes if ways.body.has_passes else ()


def _predicted(call: Call, asked: Asked) -> Ways:
    """The ways of a step of which none is compiled."""
    traced, layout, device = call.traced, _layout(call.traced.jaxpr, call.leaves), _device(call.leaves)

    def compile_with(body: Body, acting: Acting) -> Any:
        raise AssertionError("this is predicted")

    return Ways(traced, asked.allow, layout, device, *beside(traced, layout), compile_with)


class _Kept:
    """What is on disk of a step for these arguments: its plan, and what was compiled by it."""

    def __init__(self, asked: Asked, planned: _Planned):
        self._where, self._planned, call = directory(asked.cache_dir), planned, planned.call
        self._of_call = [*map(kind_of, call.leaves)], asked.budget, asked.allow, sorted(call.step.options.items())
        self._name = None
        if self._where is not None:
            kinds, *others = self._of_call
            self._name = name_of(call.traced.jaxpr, kinds, planned.device, *others)

    @functools.cached_property
    def _lowered(self) -> Any:
        return self._planned.call.traced.lower()

    def _name_of_program(self, plan: StepPlan) -> str | None:
        return name_of_program(self._lowered, self._planned.device, plan.to_json(), *self._of_call)

    def entry(self) -> Entry | None:
        """The step by the plan that is kept, compiled unless that is kept as well; None if there is no plan that is any good."""
        plan = load(self._where, self._name)
        if self._where is None or plan is None or plan.as_written:
            return None
        program = load_program(self._where, self._name_of_program(plan), self._planned.device, self._lowered)
        try:
            if program is not None:
                return self._planned.of(plan).entry(plan, program, lambda: self._planned.by(plan).jitted)
            found = self._planned.by(plan)
        except ValueError:  # another version of memjax made it
            return None
        self._put_program(found)
        return found

    def put(self, entry: Entry) -> None:
        if self._name is not None and not entry.plan.as_written:
            save(self._where, self._name, entry.plan)
            self._put_program(entry)

    def _put_program(self, entry: Entry) -> None:
        if self._where is not None and not entry.was_loaded:
            save_program(self._where, self._name_of_program(entry.plan), entry.program)


class _Planned:
    """A step for certain arguments with its passes run otherwise.

    Attributes:
      call: the step.
      layout: of its inputs.
      device: one that it runs on.
    """

    def __init__(self, call: Call):
        self.call, self.layout, self.device = call, _layout(call.traced.jaxpr, call.leaves), _device(call.leaves)
        self._step, self._args, self._kwargs, self._platform = call.step, call.args, call.kwargs, self.device.platform
        self._traced, self._closed = call.traced, call.traced.jaxpr
        self._out_tree = jax.tree.structure(call.traced.out_info)
        self._jitted: dict[int, Any] = {}
        self._loaded: set[int] = set()  # programs

    def of(self, plan: StepPlan) -> _Planned:
        """The step with its state where a plan has it that was made before."""
        return _Planned(on_host_by(self.call, plan.on_host, self.device)) if plan.on_host else self

    def entry(self, plan: StepPlan, program: Any, as_jitted: Callable[[], Any] | None = None) -> Entry:
        """The step as it was compiled to `program`, by a plan."""
        jitted = as_jitted or (lambda: self._jitted.get(id(program), self._step.plain))
        return Entry(plan, program, self.call, jitted, as_jitted is not None or id(program) in self._loaded)

    def compiled(self, body: Body, acting: Acting, *, for_memory: bool = False) -> Any:
        """The step with the passes in `acting` run by these, compiled, in the order of XLA or that of the least memory."""
        changed = acting or body.is_changed or for_memory
        # Without them nothing is computed again. The step as it is written is that of jax.jit.
        own = dict(remat_compiler_options(self._platform)) if changed else {}
        if for_memory:
            own |= ordered_for_memory(self._platform, (self._step.options.get("compiler_options") or {}) | own)
        jitted = self._with(body, acting, own) if changed else self._step.plain
        options = own | compiler_options(self._platform)
        with option_errors(self._step.options.get("compiler_options") or {}):
            lowered, before = jitted.trace(*self._args, **self._kwargs).lower(), found_in_jax_cache()
            program = lowered.compile(compiler_options=options or None)
        self._jitted[id(program)] = jitted
        if found_in_jax_cache() > before:
            self._loaded.add(id(program))
        return program

    def lowered(self, body: Body, acting: Acting) -> Any:
        """The step with the passes in `acting` run by these, lowered."""
        return self._with(body, acting, {}).trace(*self._args, **self._kwargs).lower()

    def _with(self, body: Body, acting: Acting, options: Mapping[str, Any]) -> Any:
        """The step with the passes in `acting` run by these, under `jax.jit` with these options of the compiler."""
        out_tree = self._out_tree

        def run(*args: Any, **kwargs: Any) -> Any:
            given = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_tracer(leaf)]  # the others are static
            return jax.tree.unflatten(out_tree, body.evaluate(given, acting))

        return self._step.with_options(run, options)

    def body_by(self, plan: StepPlan) -> Body:
        """The derivatives in the step, as a plan has them that was made before."""
        how = self._platform, plan.tile_nbytes, self.layout.devices > 1, plan.chunks
        tile_on = TileOn(*how) if plan.tiled else None
        rates = costs.device(device_of(self.layout.shardings)) if plan.inner_again else None
        closed = self._closed
        if plan.microbatches > 1:
            try:
                closed = in_microbatches(closed, batch_of(closed), plan.microbatches, self._platform)
            except Mixed as error:
                what = f"{plan.microbatches} microbatches, which this one cannot run in ({error})"
                raise ValueError(f"plan must be of this step, got one with {what}: {MAKE_ONE}") from error
        if plan.updates_in_loops:
            donated = donated_results(self._traced)
            closed = with_updates_in_loops(closed, donated, self._platform, two_passes=plan.two_passes).closed
            if closed is None:
                what = "updates in the loops of backward passes, which this one cannot run there"
                raise ValueError(f"plan must be of this step, got one with {what}: {MAKE_ONE}")
        options = {name: getattr(plan, name) for name in ("microbatches", "updates_in_loops", "two_passes")}
        body = Body(closed, tile_on, inner_again_on=rates, **options)
        if [one[:-2] for one in body.tiled] != [one[:-2] for one in plan.tiled]:
            what = ", ".join(one.what for one in plan.tiled)
            raise ValueError(f"plan must be of this step, got one with tiles of {what} that are not in it: {MAKE_ONE}")
        return body

    def by(self, plan: StepPlan) -> Entry:
        """The step by a plan that was made before."""
        return self.of(plan)._by(plan)

    def _by(self, plan: StepPlan) -> Entry:
        body = self.body_by(plan)
        acting = acting_by(body, plan, self.layout) if plan.passes else {}
        return self.entry(plan, self.compiled(body, acting, for_memory=plan.ordered_for_memory))

    def ordered_for_memory(self, plan: StepPlan) -> Entry | None:
        """The step by a plan that takes a little more than its budget, ordered for the least memory, if it fits then."""
        if plan.nbytes > WORTH_IT * plan.budget or not ordered_for_memory(self._platform, {}):
            return None
        found = self._by(dataclasses.replace(plan, ordered_for_memory=True))
        nbytes = held_bytes(found.program)
        return (
            None if nbytes > plan.budget else self.entry(dataclasses.replace(found.plan, nbytes=nbytes), found.program)
        )


def passes_by(call: Call, plan: StepPlan) -> tuple[list[StepPasses], Layout, Any]:
    """The passes of the derivatives in a step for which a plan was made, the layout of its inputs, and it traced so."""
    planned = _Planned(call).of(plan)
    body = planned.body_by(plan)
    note_memory(body, planned.call.traced, planned.device)
    return list(body.every()), with_shapes(planned.layout, body, planned.lowered), planned.call.traced


def _room(budget: int | str, arguments: int, device: Any) -> int | str:
    """Bytes of a device for the step, or "min"."""
    if budget != "device":
        return budget
    if is_described(device):
        fix = 'pass bytes, such as "70GiB"'
        raise check.fail(ValueError, "budget", "bytes for devices that are not there, which tell no limit", budget, fix)
    stats = (device.memory_stats() if hasattr(device, "memory_stats") else None) or {}
    if "bytes_limit" not in stats:
        return sys.maxsize  # nothing is known to limit it
    return stats["bytes_limit"] - max(stats.get("bytes_in_use", 0) - arguments, 0)


def _layout(closed: Any, leaves: Sequence[Any]) -> Layout:
    """Where the constants and inputs of the step lie."""
    shardings = [own_sharding(leaf) for leaf in (*closed.consts, *leaves)]
    devices = split_over(
        shardings, [not is_float(aval) for aval in (*map(jax.typeof, closed.consts), *closed.in_avals)]
    )
    return Layout(shardings, devices)


def _device(leaves: Sequence[Any]) -> Any:
    """A device that the step runs on."""
    return device_of([own_sharding(leaf) for leaf in leaves])


def kind_of(leaf: Any) -> Any:
    """Equal for leaves of arguments that one compiled program takes."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), leaf.sharding if leaf.committed else None
    return type(leaf), getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
