"""`memjax.jit`: `jax.jit`, and the step fits."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from memjax._core import check
from memjax._core.arguments import Statics, check_options, objects_in, put_changes
from memjax._core.clear_errors import call_errors, trace_errors
from memjax._core.compat import is_tracer
from memjax._core.platforms import traced_for_arguments
from memjax._core.program.scopes import Paths, function_name
from memjax._explain.compared import PeakComparison
from memjax._explain.explain import explain
from memjax._explain.line import line
from memjax._jit.call import Call, Step, state_of, taken_apart
from memjax._jit.decide import Asked, Entry, decided, frontier, kind_of
from memjax._jit.decide import notes as notes_of
from memjax._jit.explained import explained_peak
from memjax._jit.host.moves import kind_anywhere, type_on_device, with_state_on_device
from memjax._jit.step_plan import StepPlan, StepPoint

_ALLOWED = ("recompute", "tile", "microbatch", "offload", "compress", "two_passes")
_OF_EXPLAIN = "argnums", "compiler_options"  # arguments that are not those of the step


def jit(
    f: Callable[..., Any] | None = None,
    *,
    budget: int | str = "device",
    allow: Sequence[str] = ("recompute", "tile", "microbatch"),
    plan: StepPlan | None = None,
    cache_dir: str | os.PathLike | None = None,
    **options: Any,
) -> Any:
    """`f` under `jax.jit`, so that what is compiled holds no more than `budget` bytes of a device.

    A step that fits is the program of `jax.jit`, compiled once. Otherwise the derivatives in it, wherever they are (`jax.grad`,
    `nnx.value_and_grad`, in loops that accumulate gradients, in branches, several of them), keep less between their forward
    and backward passes, and compute the rest again. memjax takes the fastest plan that fits. To tell whether one fits,
    it compiles it exactly as it will run. Nothing in `f` is edited, and the results are the same up to rounding, as sums over
    examples may be made in another order. Where
    arguments lie on devices of several processes, the first process decides for all.

    Args:
      f: a training step: a function of pytrees, NNX objects among them, which it may update in place as under `nnx.jit`. None:
        a decorator with these options.
      budget: bytes of a device for all that the compiled step holds: arguments, results that do not reuse a donated
        argument's memory, temporaries, code; a number, or a text like "40GiB". "device": the device's memory less what
        other arrays take; if the device reports no limit, as CPUs do, every step fits; refused for devices of a
        topology, which are not there. "min": the least memory. "50%": half of what the step holds as it is written; it is
        compiled so first.
      allow: what a plan may do. "recompute": compute again what is not kept; always. "tile": go through a loss and its gradient
        tile by tile, so that logits are never whole; on one device, or within a `jax.shard_map` with check_vma=False. Messages
        between the nodes of a graph go some edges at a time, in both passes; on one device.
        "microbatch": run the derivative for some examples of the batch after the others, and add up gradients, where examples do
        not mix; on one device. "offload": move what loops keep to the memory of the host; and if no plan fits then, state of
        an optimizer lies there between steps: donated arguments that updates alone read. "compress": keep what may be
        rounded in 8 bits; gradients are rounded then. As for `memjax.plan`. "two_passes": take the derivative twice where an
        update needs a number of all gradients first, such as their norm to clip them. Then no gradients of a loop over
        layers are kept.
      plan: a `StepPlan` that `step.plan` made, to act on; `budget` is then ignored.
      cache_dir: where plans and what is compiled by them are kept, so that the next process only has to trace the step;
        None: in a folder of JAX's compilation cache, if there is one. Compiled programs from this folder are run: use
        only a folder that you trust.
      **options: those of `jax.jit`: static_argnums, donate_argnums, in_shardings, out_shardings, compiler_options, and so on.

    Returns:
      A function with the signature of `f`. It has, for arguments or `jax.ShapeDtypeStruct`s with the shardings that they will
      have: `plan(*args)`, a `StepPlan`; `frontier(*args)`, what each budget is predicted to cost; `lower(*args)` and
      `trace(*args)`, of the step as planned; `explain(*args)`, as `memjax.explain(f, *args)`; `clear_cache()`. Within other
      transforms of JAX it is `jax.jit(f)`, and plans nothing. State on the host is moved there by the first call, and comes back
      with shardings of the memory kind "pinned_host", with which JAX computes nothing outside of the step:
      `jax.device_put(state, jax.memory.Space.Device)` moves it to the device. A later call takes it from either memory.

    Saved between forward and backward pass: what the plan says. Memory: at most `budget`, or an error.

    Raises:
      ValueError: no plan fits (the message is an account of the memory), or `plan` is of another step.
      TypeError: an option that `jax.jit` does not know.
    """
    if f is None:
        return functools.partial(jit, budget=budget, allow=allow, plan=plan, cache_dir=cache_dir, **options)
    check.function("f", f)
    room = check.byte_count("budget", budget, words=("min", "device"), shares=True)
    check.names("allow", allow, _ALLOWED)
    if plan is not None and not isinstance(plan, StepPlan):
        raise check.fail(TypeError, "plan", "a StepPlan", plan, "step.plan(*args) makes one")
    if not isinstance(cache_dir, str | os.PathLike | None):
        raise check.fail(TypeError, "cache_dir", "a path", cache_dir)
    if cache_dir is not None and ("\0" in os.fspath(cache_dir) or os.path.isfile(cache_dir)):
        raise check.fail(ValueError, "cache_dir", "the path of a folder", cache_dir, "it is made where there is none")
    return Jitted(f, Asked(room, tuple(allow), plan, cache_dir), options)


class Jitted:
    """A step under `memjax.jit`."""

    def __init__(self, f: Callable[..., Any], asked: Asked, options: dict[str, Any]):
        self._f, self._asked, self._options = f, asked, options
        check_options(f, options)
        functools.update_wrapper(self, f)
        self.__name__ = function_name(f)
        self._statics = Statics(f, options.get("static_argnums"), options.get("static_argnames"))
        self._steps: dict[Any, Step] = {}
        self._entries: dict[Any, Entry] = {}
        self._anywhere: dict[Any, Entry] = {}  # those that move arguments, whichever memory these are in
        self._last: tuple[Any, Entry] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph, apart, named = taken_apart(args, kwargs)
        static, dynamic, dynamic_named = self._statics.split(apart, named)
        of_call = graph, static, _context()
        put = functools.partial(_put, args, kwargs, apart, named) if graph is not None else _as_it_is
        if any(map(is_tracer, jax.tree.leaves((dynamic, dynamic_named)))):
            return put(self._step(graph).plain(*apart, **named))
        if self._last is not None and self._last[0] == of_call and self._last[1].is_in_place(dynamic, dynamic_named):
            try:
                return put(self._last[1](dynamic, dynamic_named))
            except (TypeError, ValueError):  # of other types, or on other devices
                pass
        leaves = jax.tree.leaves((dynamic, dynamic_named))
        if structs := [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]:
            fix = "plan, trace, lower and explain take types"
            raise check.fail(TypeError, "arguments", "arrays", structs[0], fix)
        step = self._step(graph)
        entry = self._entry(step, of_call, apart, named, dynamic, dynamic_named)
        if entry is None:
            return put(step.plain(*apart, **named))
        self._last = of_call, entry
        return put(entry(dynamic, dynamic_named))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The step as a method, of which `self` is the first argument, as with `jax.jit`."""
        return self if instance is None else types.MethodType(self, instance)

    @traced_for_arguments
    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """The plan for these arguments, which are arrays or `jax.ShapeDtypeStruct`s."""
        return self._for(*taken_apart(args, kwargs)).plan

    @traced_for_arguments
    def frontier(self, *args: Any, **kwargs: Any) -> list[StepPoint]:
        """What each budget is predicted to cost, from the least memory to the least time: a `StepPoint` for each plan.

        Nothing is compiled, and bytes are those of a device. The budget does not matter. The list is empty for a step
        without derivatives.
        """
        return frontier(self._to_predict(args, kwargs), self._asked)

    @traced_for_arguments
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The step as planned, traced: a `jax.stages.Traced`."""
        graph, apart, named = taken_apart(args, kwargs)
        return self._for(graph, apart, named).trace(apart, named)

    @traced_for_arguments
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The step as planned, lowered: a `jax.stages.Lowered`."""
        return self.trace(*args, **kwargs).lower()

    @traced_for_arguments
    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """Where the memory of the step goes, as it is written: see `memjax.explain`."""
        given = {name: value for name, value in kwargs.items() if name not in _OF_EXPLAIN}
        call = self._to_predict(args, given)
        if call.elsewhere:
            args, kwargs = jax.tree.map(type_on_device, (args, kwargs))
        marked, named = self._statics.marked(args, kwargs)
        found = explain(self._f, *marked, **named)
        notes = (*found.notes, *notes_of(call, self._asked))
        return dataclasses.replace(found, notes=notes, line=line(self._f, self.options | {"budget": "40GiB"}))

    @traced_for_arguments
    def explain_peak(self, *args: Any, **kwargs: Any) -> PeakComparison:
        """Why the plan for these arguments takes other bytes than were predicted: see `memjax.explain_peak`.

        Arguments, results and code of the step are rows as well, so that the compiled bytes are `plan(*args).nbytes`. Predicted
        is the peak of the derivative that takes the most; of one that runs as it is written, the peak of keeping everything.
        """
        graph, apart, named = taken_apart(args, kwargs)
        entry = self._for(graph, apart, named)
        _, dynamic, dynamic_named = self._statics.split(apart, named)
        call = self._called(self._step(graph), apart, named, jax.tree.leaves((dynamic, dynamic_named)))
        return explained_peak(call, entry, Paths(self._f))

    @property
    def options(self) -> dict[str, Any]:
        """Those of `memjax.jit` that are not its defaults."""
        default = Asked("device", ("recompute", "tile", "microbatch"), None, None)
        own = {name: value for name, value in self._asked._asdict().items() if value != getattr(default, name)}
        return self._options | own

    def asking(self, **changes: Any) -> Jitted:
        """The same step under other options of `memjax.jit`."""
        budget, allow, plan, cache_dir = self._asked
        own = {"budget": budget, "allow": allow, "plan": plan, "cache_dir": cache_dir}
        return jit(self._f, **own | self._options | changes)

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        self._entries.clear()
        self._anywhere.clear()
        self._steps.clear()
        self._last = None

    def _for(self, graph: Any, apart: tuple, named: dict[str, Any]) -> Entry:
        static, dynamic, dynamic_named = self._statics.split(apart, named)
        of_call = graph, static, _context()
        entry = self._entry(self._step(graph), of_call, apart, named, dynamic, dynamic_named)
        if entry is None:
            wanted = "a step that closes over no value of a transform around it"
            raise check.fail(
                ValueError, "f", wanted, self._f, "pass it as an argument, or plan outside of the transform"
            )
        return entry

    def _step(self, graph: Any) -> Step:
        if graph not in self._steps:
            self._steps[graph] = Step(self._f, graph, self._options)
        return self._steps[graph]

    def _traced(self, step: Step, args: tuple, kwargs: dict[str, Any]) -> Any:
        with call_errors("f", self._f, {"arguments": (*args, *kwargs.values())}), trace_errors("f", self._f):
            return step.trace(args, kwargs)

    def _to_predict(self, args: tuple, kwargs: dict[str, Any]) -> Call:
        """The step for these arguments, of which nothing is compiled."""
        graph, apart, named = taken_apart(args, kwargs)
        _, dynamic, dynamic_named = self._statics.split(apart, named)
        return self._called(self._step(graph), apart, named, jax.tree.leaves((dynamic, dynamic_named)))

    def _entry(
        self, step: Step, of_call: Any, args: tuple, kwargs: dict[str, Any], dynamic: tuple, named: dict[str, Any]
    ) -> Entry | None:
        leaves, tree = jax.tree.flatten((dynamic, named))
        key = of_call, tree, tuple(map(kind_of, leaves))
        anywhere = of_call, tree, tuple(map(kind_anywhere, leaves))
        if key not in self._entries and anywhere not in self._anywhere:
            call = self._called(step, args, kwargs, leaves)
            if _closes_over_tracers(call.traced.jaxpr, leaves):
                return None
            found = self._entries[key] = decided(call, self._asked)
            if found.moves:
                self._anywhere[anywhere] = found
        return self._entries[key] if key in self._entries else self._anywhere[anywhere]

    def _called(self, step: Step, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> Call:
        """The step for these arguments. If it refuses arrays on the host, they count as on a device."""
        try:
            return Call(step, args, kwargs, leaves, self._traced(step, args, kwargs))
        except (TypeError, ValueError):
            own = self._asked.plan is not None or "offload" in self._asked.allow
            found = with_state_on_device(step, args, kwargs, leaves) if own else None
            if found is None:
                raise
            return found


def _as_it_is(out: Any) -> Any:
    return out


def _put(args: tuple, kwargs: dict[str, Any], apart: tuple, named: dict[str, Any], out: Any) -> Any:
    """The result of a step with NNX objects among its arguments, which get their new values."""
    result, changes = out
    put_changes(objects_in((args, kwargs)), changes, state_of(apart, named))
    return result


def _closes_over_tracers(closed: Any, leaves: Sequence[Any]) -> bool:
    """Whether a traced step closes over values of a transform around it: JAX makes them inputs, before the arguments."""
    return len(closed.in_avals) > len(leaves) or any(map(is_tracer, closed.consts))


def _context() -> tuple[Any, ...]:
    """What JAX traces by besides arguments."""
    names = "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_device"
    return jax.sharding.get_abstract_mesh(), *(getattr(jax.config, name, None) for name in names)
