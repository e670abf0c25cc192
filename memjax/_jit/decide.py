"""A step for arguments of certain types: as it is written if it fits, or by a plan, compiled as it will run."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from memjax._core import check
from memjax._core.arrays import is_float
from memjax._core.clear_errors import option_errors
from memjax._core.compat import is_described, is_tracer
from memjax._core.meshes import device_of, own_sharding, split_over
from memjax._core.positions.walk import Mixed
from memjax._core.program import costs
from memjax._core.program.scopes import function_name
from memjax._jit.account import BudgetError, account, beside, donated_results, fixed_bytes
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
from memjax._jit.call import Pure, donated_values
from memjax._jit.candidates import DoesNotFitError, held_bytes
from memjax._jit.derivatives.acting import MAKE_ONE, acting_by
from memjax._jit.derivatives.body import Acting, Body
from memjax._jit.derivatives.passes import StepPasses
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
      as_jitted: gives it as a function under `jax.jit`.
    """

    def __init__(self, plan: StepPlan, program: Any, as_jitted: Callable[[], Any]):
        self.plan, self.program, self._as_jitted = plan, program, as_jitted

    @functools.cached_property
    def jitted(self) -> Any:
        return self._as_jitted()


class Asked(NamedTuple):
    """What a user asks of a plan: see `jit`."""

    budget: int | str
    allow: tuple[str, ...]
    plan: StepPlan | None
    cache_dir: str | os.PathLike | None


class Step:
    """A step whose NNX objects have a certain structure.

    Attributes:
      graph: that structure.
      f, name, options: the function, its name, and what `jax.jit` is given.
      plain: the step as it is written, under `jax.jit`, a function of arguments that are taken apart.
    """

    def __init__(self, f: Callable[..., Any], graph: Any, options: dict[str, Any]):
        self.graph, self.f, self.options = graph, f, options
        self.name = function_name(f)
        self._pure = Pure(f, graph)
        self.plain = self._jitted()

    def _jitted(self) -> Any:
        if self.graph is None:
            return jax.jit(self.f, **self.options)
        return self.with_options(lambda *args, **kwargs: self._pure(args, kwargs))

    def with_options(self, run: Callable[..., Any], more: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """`run`, a function of the same arguments, under `jax.jit` as the step is, and with more options of the compiler."""
        options = self.options
        if more:
            options = options | {"compiler_options": {**(options.get("compiler_options") or {}), **more}}
        run = functools.wraps(self.f)(run)
        run.__name__ = self.name  # which a functools.partial has none of
        return jax.jit(run, **options)

    def trace(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The step as it is written, traced. What is donated and stays as it is becomes a result."""
        if self.graph is not None and self.options.keys() & {"donate_argnums", "donate_argnames"}:
            donated = donated_values(self.f, self.options, args, kwargs)
            if not donated <= self._pure.returned:
                self._pure.returned |= donated
                self.plain = self._jitted()
        return self.plain.trace(*args, **kwargs)


def decided(step: Step, traced: Any, asked: Asked, args: tuple, kwargs: dict[str, Any], leaves: Sequence[Any]) -> Entry:
    """The step for these arguments, traced: as it is written if it fits, or by a plan."""
    layout, device = _layout(traced.jaxpr, leaves), _device(leaves)
    planned = _Planned(step, traced, args, kwargs, device.platform)
    if asked.plan is not None:
        return planned.by(asked.plan, layout)
    if not are_in_all_processes(leaves):
        return _decided_here(step, traced, asked, planned, layout, device, leaves)
    found: list[Entry] = []

    def plan() -> StepPlan:
        found.append(_decided_here(step, traced, asked, planned, layout, device, leaves))
        return found[0].plan

    plan_of_all = plan_of_the_first(plan)
    return found[0] if found else planned.by(plan_of_all, layout)


def _decided_here(
    step: Step, traced: Any, asked: Asked, planned: _Planned, layout: Layout, device: Any, leaves: Sequence[Any]
) -> Entry:
    """The same, decided in this process."""
    kept = _Kept(asked, step, traced, leaves, device)
    arguments, results = beside(traced, layout)
    room = _room(asked.budget, arguments, device)
    found = kept.entry(planned, layout)
    if found is not None and held_bytes(found.program) <= (found.plan.nbytes if isinstance(room, str) else room):
        return found
    progress = Progress(step.name)

    def compile_with(body: Body, acting: Acting) -> Any:
        compiled = planned.compiled(body, acting)
        if acting or body.is_changed:
            progress.compiled(held_bytes(compiled), room, ways.way)
        return compiled

    ways = Ways(traced, asked.allow, layout, device, arguments, results, compile_with, planned.lowered)
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
            return Entry(as_written, program, lambda: step.plain)
    try:
        chosen, best = ways.fastest(room)
        chosen = beside_plain(chosen)
    except DoesNotFitError as error:
        least = beside_plain(error.plan)
        if (found := planned.ordered_for_memory(least, layout)) is None:
            raise BudgetError(account(least, error.program, traced, step.f), least) from None
        chosen, best = found.plan, found.program
    kept.put(planned, chosen, best)
    progress.done(chosen)
    return Entry(chosen, best, lambda: planned.jitted_of(best))


def frontier(traced: Any, asked: Asked, leaves: Sequence[Any]) -> list[StepPoint]:
    """What a step is predicted to hold and to take, by budget: see `Ways.frontier`. Nothing is compiled."""
    return _predicted(traced, asked, leaves).frontier()


def notes(traced: Any, asked: Asked, leaves: Sequence[Any]) -> tuple[str, ...]:
    """Which of the ways that are allowed a step does not have, and why. Nothing is compiled."""
    ways = _predicted(traced, asked, leaves)
    return ways.notes if ways.body.has_passes else ()


def _predicted(traced: Any, asked: Asked, leaves: Sequence[Any]) -> Ways:
    """The ways of a step of which none is compiled."""
    layout, device = _layout(traced.jaxpr, leaves), _device(leaves)

    def compile_with(body: Body, acting: Acting) -> Any:
        raise AssertionError("this is predicted")

    return Ways(traced, asked.allow, layout, device, *beside(traced, layout), compile_with)


class _Kept:
    """What is on disk of a step for these arguments: its plan, and what was compiled by it."""

    def __init__(self, asked: Asked, step: Step, traced: Any, leaves: Sequence[Any], device: Any):
        self._where, self._device, self._traced = directory(asked.cache_dir), device, traced
        self._of_call = [*map(kind_of, leaves)], asked.budget, asked.allow, sorted(step.options.items())
        self._name = None
        if self._where is not None:
            kinds, *others = self._of_call
            self._name = name_of(traced.jaxpr, kinds, device, *others)

    @functools.cached_property
    def _lowered(self) -> Any:
        return self._traced.lower()

    def _name_of_program(self, plan: StepPlan) -> str | None:
        return name_of_program(self._lowered, self._device, plan.to_json(), *self._of_call)

    def entry(self, planned: _Planned, layout: Layout) -> Entry | None:
        """The step by the plan that is kept, compiled unless that is kept as well; None if there is no plan that is any good."""
        plan = load(self._where, self._name)
        if self._where is None or plan is None or plan.as_written:
            return None
        program = load_program(self._where, self._name_of_program(plan), self._device, self._lowered)
        if program is not None:
            return Entry(plan, program, lambda: planned.by(plan, layout).jitted)
        try:
            found = planned.by(plan, layout)
        except ValueError:  # another version of memjax made it
            return None
        self._put_program(planned, plan, found.program)
        return found

    def put(self, planned: _Planned, plan: StepPlan, program: Any) -> None:
        save(self._where, self._name, plan)
        if self._name is not None and not plan.as_written:
            self._put_program(planned, plan, program)

    def _put_program(self, planned: _Planned, plan: StepPlan, program: Any) -> None:
        if self._where is not None and not planned.was_loaded(program):
            save_program(self._where, self._name_of_program(plan), program)


class _Planned:
    """A traced step with its passes run otherwise.

    Args:
      step, traced: it.
      args, kwargs: its arguments, taken apart.
      platform: of the devices that it runs on.
    """

    def __init__(self, step: Step, traced: Any, args: tuple, kwargs: dict[str, Any], platform: str):
        self._step, self._args, self._kwargs, self._platform = step, args, kwargs, platform
        self._traced, self._closed, self._out_tree = traced, traced.jaxpr, jax.tree.structure(traced.out_info)
        self._jitted: dict[int, Any] = {}
        self._loaded: set[int] = set()  # programs

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

    def jitted_of(self, program: Any) -> Any:
        """The function that was compiled to `program`."""
        return self._jitted.get(id(program), self._step.plain)

    def was_loaded(self, program: Any) -> bool:
        """Whether JAX has found the program in its cache."""
        return id(program) in self._loaded

    def body_by(self, plan: StepPlan, layout: Layout) -> Body:
        """The derivatives in the step, as a plan has them that was made before."""
        how = self._platform, plan.tile_nbytes, layout.devices > 1, plan.chunks
        tile_on = TileOn(*how) if plan.tiled else None
        rates = costs.device(device_of(layout.shardings)) if plan.inner_again else None
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

    def by(self, plan: StepPlan, layout: Layout) -> Entry:
        """The step by a plan that was made before."""
        body = self.body_by(plan, layout)
        acting = acting_by(body, plan, layout) if plan.passes else {}
        program = self.compiled(body, acting, for_memory=plan.ordered_for_memory)
        return Entry(plan, program, lambda: self.jitted_of(program))

    def ordered_for_memory(self, plan: StepPlan, layout: Layout) -> Entry | None:
        """The step by a plan that takes a little more than its budget, ordered for the least memory, if it fits then."""
        if plan.nbytes > WORTH_IT * plan.budget or not ordered_for_memory(self._platform, {}):
            return None
        found = self.by(dataclasses.replace(plan, ordered_for_memory=True), layout)
        nbytes = held_bytes(found.program)
        if nbytes > plan.budget:
            return None
        fitting = dataclasses.replace(found.plan, nbytes=nbytes)
        return Entry(fitting, found.program, lambda: self.jitted_of(found.program))


def passes_by(
    step: Step, traced: Any, plan: StepPlan, args: tuple, kwargs: dict[str, Any], leaves: Sequence[Any]
) -> tuple[list[StepPasses], Layout]:
    """The passes of the derivatives in a step for which a plan was made, and the layout of its inputs."""
    layout, device = _layout(traced.jaxpr, leaves), _device(leaves)
    planned = _Planned(step, traced, args, kwargs, device.platform)
    body = planned.body_by(plan, layout)
    note_memory(body, traced, device)
    return list(body.every()), with_shapes(layout, body, planned.lowered)


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
