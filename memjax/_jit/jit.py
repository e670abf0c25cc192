"""`memjax.jit`: `jax.jit`, and the step fits."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from memjax._core import check
from memjax._core.arguments import objects_in, put_changes
from memjax._core.arrays import is_float
from memjax._core.clear_errors import call_errors, option_errors, trace_errors
from memjax._core.compat import is_tracer
from memjax._core.meshes import own_sharding, split_over
from memjax._core.program.jaxpr import nbytes as nbytes_of
from memjax._explain.explain import explain
from memjax._jit.account import account, bytes_of_results
from memjax._jit.body import Acting, Body
from memjax._jit.cache import directory, load, name_of, save
from memjax._jit.call import Pure, Statics, donated_but_unchanged, taken_apart
from memjax._jit.fit import MAKE_ONE, DoesNotFitError, Fit, acting_by, held_bytes
from memjax._jit.progress import Progress
from memjax._jit.step_plan import StepPlan
from memjax._measure import remat_compiler_options
from memjax._plan.compiled import device_of
from memjax._plan.layout import Layout
from memjax._plan.tile.passes import TileOn

_TILES = 64  # the logits of a tile take such a part of the budget: beside them a tile has others as large
_ALLOWED = ("recompute", "tile", "offload", "compress")


class _Entry(NamedTuple):
    """A step for arguments of some types and shardings.

    Attributes:
      plan: of it.
      jitted: it as a function under `jax.jit`.
      program: it, compiled.
    """

    plan: StepPlan
    jitted: Any
    program: Any


def jit(
    f: Callable[..., Any] | None = None,
    *,
    budget: int | str = "device",
    allow: Sequence[str] = ("recompute", "tile"),
    plan: StepPlan | None = None,
    cache_dir: str | os.PathLike | None = None,
    **options: Any,
) -> Any:
    """`f` under `jax.jit`, so that what is compiled holds no more than `budget` bytes of a device.

    A step that fits is the program of `jax.jit`, compiled once. Otherwise the derivatives in it, wherever they are (`jax.grad`,
    `nnx.value_and_grad`, in loops that accumulate gradients, in branches, several of them), keep less between their forward
    and backward passes, and compute the rest again: the fastest plan that fits, each candidate being compiled as it will run.
    Nothing in `f` is edited, and the results are the same up to rounding.

    Args:
      f: a training step: a function of pytrees, NNX objects among them, which it may update in place as under `nnx.jit`. None:
        a decorator with these options.
      budget: bytes of a device for all that the compiled step holds: arguments, results that are no donated arguments,
        temporaries, code; a number, or a text like "40GiB". "device": the device's memory less what other arrays take; on
        devices that tell no limit, as CPUs, everything fits. "min": the least memory.
      allow: what a plan may do. "recompute": compute again what is not kept; always. "tile": go through a loss and its gradient
        tile by tile, so that logits are never whole; on one device, or within a `jax.shard_map` with check_vma=False. "offload":
        move what loops keep to the memory of the host. "compress": keep what may be rounded in 8 bits; gradients are rounded
        then. As for `memjax.plan`.
      plan: a `StepPlan` that `step.plan` made, to act on; `budget` is not asked then.
      cache_dir: where plans are kept, so that the next process compiles the step once; None: in a folder of JAX's compilation
        cache, if there is one.
      **options: those of `jax.jit`: static_argnums, donate_argnums, in_shardings, out_shardings, compiler_options, and so on.

    Returns:
      A function with the signature of `f`. It has, for arguments or `jax.ShapeDtypeStruct`s with the shardings that they will
      have: `plan(*args)`, a `StepPlan`; `lower(*args)` and `trace(*args)`, of the step as planned; `explain(*args)`, as
      `memjax.explain(f, *args)`; `clear_cache()`. Within other transforms of JAX it is `jax.jit(f)`, and plans nothing.

    Saved between forward and backward pass: what the plan says. Memory: at most `budget`, or an error.

    Raises:
      ValueError: no plan fits (the message is an account of the memory), or `plan` is of another step.
      TypeError: an option that `jax.jit` does not know.
    """
    if f is None:
        return functools.partial(jit, budget=budget, allow=allow, plan=plan, cache_dir=cache_dir, **options)
    check.function("f", f)
    room = check.byte_count("budget", budget, words=("min", "device"))
    if isinstance(allow, str) or not isinstance(allow, Sequence):
        raise check.fail(TypeError, "allow", "a sequence of names", allow, 'such as ("recompute",)')
    for name in allow:
        check.choice("allow", name, _ALLOWED)
    if plan is not None and not isinstance(plan, StepPlan):
        raise check.fail(TypeError, "plan", "a StepPlan", plan, "step.plan(*args) makes one")
    if not isinstance(cache_dir, str | os.PathLike | None):
        raise check.fail(TypeError, "cache_dir", "a path", cache_dir)
    if cache_dir is not None and ("\0" in os.fspath(cache_dir) or os.path.isfile(cache_dir)):
        raise check.fail(ValueError, "cache_dir", "the path of a folder", cache_dir, "it is made where there is none")
    return Jitted(f, _Asked(room, tuple(allow), plan, cache_dir), options)


class _Asked(NamedTuple):
    """What a user asks of a plan: see `jit`."""

    budget: int | str
    allow: tuple[str, ...]
    plan: StepPlan | None
    cache_dir: str | os.PathLike | None


class Jitted:
    """A step under `memjax.jit`."""

    def __init__(self, f: Callable[..., Any], asked: _Asked, options: dict[str, Any]):
        self._f, self._asked, self._options = f, asked, options
        _check_options(f, options)
        functools.update_wrapper(self, f)
        self._statics = Statics(f, options.get("static_argnums"), options.get("static_argnames"))
        self._steps: dict[Any, _Step] = {}
        self._entries: dict[Any, _Entry] = {}
        self._last: tuple[Any, _Entry] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph, apart, named = taken_apart(args, kwargs)
        step = self._step(graph)
        static, dynamic, dynamic_named = self._statics.split(apart, named)
        if any(map(is_tracer, jax.tree.leaves((dynamic, dynamic_named)))):
            return self._updated(step, args, kwargs, step.plain(*apart, **named))
        of_call = graph, static, _context()
        if self._last is not None and self._last[0] == of_call:
            try:
                return self._updated(step, args, kwargs, self._last[1].program(*dynamic, **dynamic_named))
            except (TypeError, ValueError):  # of other types, or on other devices
                pass
        entry = self._entry(step, of_call, apart, named, dynamic, dynamic_named)
        if entry is None:
            return self._updated(step, args, kwargs, step.plain(*apart, **named))
        if structs := [
            leaf for leaf in jax.tree.leaves((dynamic, dynamic_named)) if isinstance(leaf, jax.ShapeDtypeStruct)
        ]:
            fix = "plan, trace, lower and explain take types"
            raise check.fail(TypeError, "arguments", "arrays", structs[0], fix)
        self._last = of_call, entry
        return self._updated(step, args, kwargs, entry.program(*dynamic, **dynamic_named))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The step as a method, of which `self` is the first argument, as with `jax.jit`."""
        return self if instance is None else types.MethodType(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """The plan for these arguments, which are arrays or `jax.ShapeDtypeStruct`s."""
        return self._for(*taken_apart(args, kwargs)).plan

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The step as planned, traced: a `jax.stages.Traced`."""
        graph, apart, named = taken_apart(args, kwargs)
        return self._for(graph, apart, named).jitted.trace(*apart, **named)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The step as planned, lowered: a `jax.stages.Lowered`."""
        return self.trace(*args, **kwargs).lower()

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """Where the memory of the step goes, as it is written: see `memjax.explain`."""
        return explain(self._f, *args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        self._entries.clear()
        self._steps.clear()
        self._last = None

    def _for(self, graph: Any, apart: tuple, named: dict[str, Any]) -> _Entry:
        static, dynamic, dynamic_named = self._statics.split(apart, named)
        of_call = graph, static, _context()
        entry = self._entry(self._step(graph), of_call, apart, named, dynamic, dynamic_named)
        if entry is None:
            wanted = "a step that closes over no value of a transform around it"
            raise check.fail(
                ValueError, "f", wanted, self._f, "pass it as an argument, or plan outside of the transform"
            )
        return entry

    def _step(self, graph: Any) -> _Step:
        if graph not in self._steps:
            self._steps[graph] = _Step(self._f, graph, self._options)
        return self._steps[graph]

    def _updated(self, step: _Step, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
        if step.graph is None:
            return out
        result, changes = out
        put_changes(objects_in((args, kwargs)), changes)
        return result

    def _entry(
        self, step: _Step, of_call: Any, args: tuple, kwargs: dict[str, Any], dynamic: tuple, named: dict[str, Any]
    ) -> _Entry | None:
        leaves, tree = jax.tree.flatten((dynamic, named))
        key = of_call, tree, tuple(map(_kind, leaves))
        if key not in self._entries:
            with call_errors("f", self._f, {"arguments": (*args, *kwargs.values())}), trace_errors("f", self._f):
                traced = step.trace(args, kwargs)
            if _closes_over_tracers(traced.jaxpr, leaves):
                return None
            self._entries[key] = _decided(step, traced, self._asked, args, kwargs, leaves)
        return self._entries[key]


def _check_options(f: Callable[..., Any], options: dict[str, Any]) -> None:
    """Says which of the options `jax.jit` refuses, and why."""
    check.compiler_options(options.get("compiler_options"))
    one_by_one = [{name: value} for name, value in options.items()]
    for some in (*one_by_one, options):
        try:
            jax.jit(f, **some)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            [name] = some if len(some) == 1 else ["options"]
            kind = ValueError if isinstance(error, ValueError | RuntimeError) else TypeError
            value = some if name == "options" else some[name]
            raise check.fail(kind, name, "what jax.jit takes", value, f"it says {str(error)!r}") from error


class _Step:
    """A step whose NNX objects have a certain structure.

    Attributes:
      graph: that structure.
      name, options: of the function, and of `jax.jit`.
      plain: the step as it is written, under `jax.jit`, a function of arguments that are taken apart.
    """

    def __init__(self, f: Callable[..., Any], graph: Any, options: dict[str, Any]):
        self.graph, self._f, self.options = graph, f, options
        self.name = getattr(f, "__name__", type(f).__name__)
        self._pure = Pure(f, graph)
        self.plain = self._jitted()

    def _jitted(self) -> Any:
        if self.graph is None:
            return jax.jit(self._f, **self.options)
        return self.with_options(lambda *args, **kwargs: self._pure(args, kwargs))

    def with_options(self, run: Callable[..., Any]) -> Any:
        """`run`, a function of the same arguments, under `jax.jit` as the step is."""
        return jax.jit(functools.wraps(self._f)(run), **self.options)

    def trace(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The step as it is written, traced. What is donated and stays as it is becomes a result."""
        traced = self.plain.trace(*args, **kwargs)
        if self.graph is not None and (missing := donated_but_unchanged(traced)):
            self._pure.returned |= missing
            self.plain = self._jitted()
            traced = self.plain.trace(*args, **kwargs)
        return traced


def _closes_over_tracers(closed: Any, leaves: Sequence[Any]) -> bool:
    """Whether a traced step closes over values of a transform around it: JAX makes them inputs, before the arguments."""
    return len(closed.in_avals) > len(leaves) or any(map(is_tracer, closed.consts))


def _decided(
    step: _Step, traced: Any, asked: _Asked, args: tuple, kwargs: dict[str, Any], leaves: Sequence[Any]
) -> _Entry:
    """The step for these arguments, traced: as it is written if it fits, or by a plan."""
    closed, layout, device = traced.jaxpr, _layout(traced.jaxpr, leaves), _device(leaves)
    where = directory(asked.cache_dir)
    name = None
    if where is not None:
        name = name_of(closed, [*map(_kind, leaves)], device, asked.budget, asked.allow, sorted(step.options.items()))
    planned = _Planned(step, traced, args, kwargs, device.platform)
    if asked.plan is not None:
        return planned.by(asked.plan, layout)
    arguments = sum(map(_local_bytes, closed.in_avals, layout.shardings[len(closed.consts) :]))
    room = _room(asked.budget, arguments, device)
    found = planned.as_before(load(where, name), layout)
    if found is not None and held_bytes(found.program) <= (found.plan.nbytes if isinstance(room, str) else room):
        return found
    progress, beside = Progress(step.name), arguments + bytes_of_results(traced)
    allowed = {"compress": "compress" in asked.allow, "offload": "offload" in asked.allow}

    def fit_of(body: Body) -> Fit:
        def compile_with(acting: Acting) -> Any:
            compiled = planned.compiled(body, acting)
            if acting or body.tiled:
                progress.compiled(held_bytes(compiled), room)
            return compiled

        return Fit(body, layout, compile_with, beside, **allowed)

    body = Body(closed)
    fit = fit_of(body)
    limit = room if isinstance(room, int) and room < sys.maxsize else None
    if limit is None or not body.has_passes or fit.may_fit_plain(limit):
        program, nbytes = fit.plain
        as_written = StepPlan(nbytes if limit is None else limit, nbytes, nbytes)
        if not body.has_passes and nbytes > as_written.budget:
            raise ValueError(account(as_written, program, traced, nothing_to_plan=True))
        if not body.has_passes or (isinstance(room, int) and nbytes <= room):
            return _Entry(as_written, step.plain, program)
    ways = [fit]
    if "tile" in asked.allow:
        tile_on = TileOn(device.platform, room // _TILES if isinstance(room, int) else 0, layout.devices > 1)
        if (tiled := Body(closed, tile_on)).tiled:
            ways.append(fit_of(tiled))
    try:
        decided, best = _fastest(ways, room)
    except DoesNotFitError as error:
        raise ValueError(account(error.plan, error.program, traced)) from None
    save(where, name, decided)
    return _Entry(decided, planned.jitted_of(best), best)


def _fastest(ways: Sequence[Fit], room: int | str) -> tuple[StepPlan, Any]:
    """The plan of the way that is predicted to be the fastest, and the step compiled with it; of the next one if it does not fit.

    Args:
      ways: the step as it is written, then others.
      room: bytes of a device.

    Raises:
      DoesNotFitError: no way fits; it is the one that takes the least.
    """
    refused: list[DoesNotFitError] = []
    for fit in sorted(ways, key=lambda one: one.rank(room)) if len(ways) > 1 else ways:
        try:
            plan, program = fit.within(room)
            return dataclasses.replace(plan, plain_nbytes=ways[0].plain_nbytes), program
        except DoesNotFitError as error:
            refused.append(error)
    raise min(refused, key=lambda error: error.plan.nbytes)


class _Planned:
    """A traced step with its passes run otherwise.

    Args:
      step, traced: it.
      args, kwargs: its arguments, taken apart.
      platform: of the devices that it runs on.
    """

    def __init__(self, step: _Step, traced: Any, args: tuple, kwargs: dict[str, Any], platform: str):
        self._step, self._args, self._kwargs, self._platform = step, args, kwargs, platform
        self._closed, self._out_tree = traced.jaxpr, jax.tree.structure(traced.out_info)
        self._jitted: dict[int, Any] = {}

    def compiled(self, body: Body, acting: Acting) -> Any:
        """The step with the passes in `acting` run by these, compiled."""
        out_tree = self._out_tree

        def run(*args: Any, **kwargs: Any) -> Any:
            given = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_tracer(leaf)]  # the others are static
            return jax.tree.unflatten(out_tree, body.evaluate(given, acting))

        changed = acting or body.tiled
        jitted = self._step.with_options(run) if changed else self._step.plain
        # Without them nothing is computed again. The step as it is written is that of jax.jit.
        options = remat_compiler_options(self._platform) if changed else None
        with option_errors(self._step.options.get("compiler_options") or {}):
            program = jitted.trace(*self._args, **self._kwargs).lower().compile(compiler_options=options)
        self._jitted[id(program)] = jitted
        return program

    def jitted_of(self, program: Any) -> Any:
        """The function that was compiled to `program`."""
        return self._jitted.get(id(program), self._step.plain)

    def by(self, plan: StepPlan, layout: Layout) -> _Entry:
        """The step by a plan that was made before."""
        body = Body(self._closed, TileOn(self._platform, plan.tile_nbytes, layout.devices > 1) if plan.tiled else None)
        if [one[:-2] for one in body.tiled] != [one[:-2] for one in plan.tiled]:
            what = ", ".join(one.what for one in plan.tiled)
            raise ValueError(f"plan must be of this step, got one with tiles of {what} that are not in it: {MAKE_ONE}")
        program = self.compiled(body, acting_by(body, plan, layout) if plan.passes else {})
        return _Entry(plan, self.jitted_of(program), program)

    def as_before(self, plan: StepPlan | None, layout: Layout) -> _Entry | None:
        """The step by a plan that was kept; None if there is none, or another version of memjax made it."""
        if plan is None or plan.as_written:
            return None
        try:
            return self.by(plan, layout)
        except ValueError:
            return None


def _local_bytes(aval: Any, sharding: Any) -> int:
    """Bytes of a device's part of an array."""
    return nbytes_of(aval if sharding is None else aval.update(shape=sharding.shard_shape(aval.shape), sharding=None))


def _room(budget: int | str, arguments: int, device: Any) -> int | str:
    """Bytes of a device for the step, or "min"."""
    if budget != "device":
        return budget
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


def _context() -> tuple[Any, ...]:
    """What JAX traces by besides arguments."""
    names = "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_device"
    return jax.sharding.get_abstract_mesh(), *(getattr(jax.config, name, None) for name in names)


def _kind(leaf: Any) -> Any:
    """Equal for leaves of arguments that one compiled program takes."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), leaf.sharding if leaf.committed else None
    return type(leaf), getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
