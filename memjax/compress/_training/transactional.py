"""`transactional`: a step whose codes overflow changes nothing, and is repeated with more capacity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check
from memjax._core.clear_errors import argument_errors, call_errors, option_errors
from memjax.compress._error_bounded.error_bounded import ErrorBounded
from memjax.compress._training.adaptive import AdaptiveState
from memjax.compress._training.layers import LADDER, Layers, split_layers

_STEP = "(state, *args) -> (state, out)"
Capacities = list[tuple[float | None, ...]]


def transactional(
    step: Callable[..., tuple[Any, Any]],
    *,
    margin: float = 1.15,
    window: int = 100,
    saving: float = 0.05,
    donate: bool = True,
    ahead: bool = False,
    compiler_options: dict[str, Any] | None = None,
    **jit_options: Any,
) -> Transactional:
    """A training step whose codes may overflow: it is then repeated with the same arguments and more capacity.

    An overflow leaves all of the state as it was: parameters, optimizer, running statistics and keys. The device decides that.
    The host reads one flag per step; after an overflow it raises the capacities to what the codes needed, a rung of `LADDER`
    or, above the top rung, raw values, which cannot overflow. So the results are bit for bit those of a run with enough
    capacity from the beginning.

    Capacities begin with those of the `Layers` in the state, which stay as they are. They are part of the compiled program:
    `jit` keeps a program for each set of capacities. They rise with overflows, and fall where a whole `window` of steps would
    have needed `saving` less memory for codes. A new capacity is the lowest rung of `LADDER` above `margin` times the need,
    which is known to within a rung.

    Reading the flag waits for the step. With `ahead`, the flag is read while the next step runs, so that the device is never
    idle: if a step overflowed, the next one has changed nothing either, and both are repeated. So the state is always that of
    whole steps; call `finish` to be sure of the last one. The `out` of a step that is repeated was returned before: what
    follows from the forward pass is right in it, what follows from the gradients is not.

    Args:
      step: a pure function `(state, *args) -> (state, out)` that updates the state with `adaptive`. The state contains the
        `Layers` and the state of `adaptive`.
      margin: ratio of capacity to need.
      window: number of steps whose needs are remembered.
      saving: share of all codes' bytes that is worth compiling again.
      donate: whether the memory of the state passed in is reused; it cannot be read afterwards.
      ahead: whether a step begins before it is known that the one before it did not overflow; its other arguments are kept
        until then.
      compiler_options, jit_options: those of `jax.jit`.

    Returns:
      A function `(state, *args) -> (state, out)`, with attributes `replays` (how often a step overflowed),
      `compiled` (number of sets of capacities so far) and `capacities` (bits per value, by `Layers` and array), and methods
      `finish(state)`, which gives the state after all steps, and `lower(state, *args)`, which lowers a function whose argument
      after the state says whether an earlier step overflowed.

    Raises:
      ValueError: `margin` is below 1, `window` below 1 or `saving` is not between 0 and 1; called with a state that has no
        `Layers` or no state of `adaptive`, or a step that returns a state of another structure.
      TypeError: options of the wrong kind; when called, a step that returns no pair, or arrays of other types in the state.
    """
    check.compiler_options(compiler_options)
    for name in jit_options.keys() & {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames"}:
        raise check.fail(TypeError, name, "left out", jit_options[name], "bind what is static with functools.partial")
    options = {"compiler_options": compiler_options, **jit_options}
    return Transactional(step, margin, window, saving, donate, ahead, options)


class Transactional:
    """See `transactional`."""

    def __init__(
        self, step, margin: float, window: int, saving: float, donate: bool, ahead: bool, options: dict[str, Any]
    ):
        check.function("step", step, _STEP)
        check.number("margin", margin, least=1)
        check.integer("window", window, least=1)
        if not 0 < check.number("saving", saving) < 1:
            raise ValueError(f"saving must be a number between 0 and 1, got {saving!r}")
        check.flag("donate", donate)
        check.flag("ahead", ahead)
        self._margin, self._window, self._saving = margin, window, saving
        self._step, self._compiler_options = step, options.get("compiler_options") or {}
        self._needs: list[list[np.ndarray]] = []
        self._capacities: Capacities | None = None
        self.replays = 0
        self._visited: set[Any] = set()
        self._most_under_way = 1 if ahead else 0
        # Arguments and reports of steps that may have overflowed. Each step gets the flag of the one before it.
        self._under_way: list[tuple[tuple, dict[str, Any]]] = []
        self._false: Any = None
        # Capacities are put into the state inside the traced function: outside, every step would rebuild a large tree.
        self._jitted = jax.jit(self._run, static_argnums=1, donate_argnums=(0,) if donate else (), **options)

    def _run(self, state: Any, capacities: Any, earlier_overflowed: Any, *args: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Runs the step; returns the new state, or the old one if codes overflowed, the step's result, and a report."""
        with_capacities = _with_capacities(state, capacities)
        with call_errors("step", self._step, {"the state": with_capacities, "arguments": args}):
            result = self._step(with_capacities, *args)
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise check.fail(TypeError, "step", "a function that returns a pair", result, _STEP)
        new, out = result
        before, after = str(jax.tree.structure(with_capacities)), str(jax.tree.structure(new))
        if before != after:
            raise ValueError(f"step must return a state of the structure that it gets, {before}, got {after}")
        leaves = jax.tree_util.tree_leaves_with_path(with_capacities)
        for (path, old), leaf in zip(leaves, jax.tree.leaves(new), strict=True):
            old, leaf = jax.typeof(old), jax.typeof(leaf)
            if (old.shape, old.dtype) != (leaf.shape, leaf.dtype):
                name, types = f"state{jax.tree_util.keystr(path)}", (old.str_short(), leaf.str_short())
                raise TypeError(f"step must return {name} of the type that it gets, {types[0]}, got {types[1]}")
        last = _adaptive_state(new).last
        overflowed = earlier_overflowed | jnp.any(jnp.stack([jnp.any(one.overflows > 0) for one in last]))
        new = _with_capacities(new, _capacities_of(state))
        kept = jax.tree.map(lambda before, after: jnp.where(overflowed, before, after), state, new)
        return kept, out, {"overflowed": overflowed, "rungs": [statistics.rung for statistics in last]}

    def __repr__(self) -> str:
        return f"Transactional(replays={self.replays}, compiled={self.compiled}, capacities={self._capacities})"

    @property
    def compiled(self) -> int:
        return len(self._visited)

    @property
    def capacities(self) -> Capacities | None:
        """Bits per value for the next step, for each `Layers` and array; None before the first step."""
        return self._capacities

    @capacities.setter
    def capacities(self, new: Capacities) -> None:
        if not isinstance(new, list) or not all(isinstance(group, tuple | list) for group in new):
            wanted = "a list with a tuple of bits per value for each Layers"
            raise check.fail(TypeError, "capacities", wanted, new)
        for bits in (bits for group in new for bits in group):
            ErrorBounded(1.0, bits_per_value=bits)  # the constructor validates `bits_per_value`
        self._capacities = [tuple(group) for group in new]

    def trace(self, state: Any, *args: Any) -> Any:
        """Traces the step as the next call will run it, like `jax.jit(step).trace`."""
        capacities = self._capacities or _capacities_of(state)
        sharding = getattr(_adaptive_state(state).step, "sharding", None)
        flag = jax.ShapeDtypeStruct((), bool, sharding=sharding)
        return self._jitted.trace(state, tuple(capacities), flag, *args)

    def lower(self, state: Any, *args: Any) -> Any:
        return self.trace(state, *args).lower()

    def __call__(self, state: Any, *args: Any) -> tuple[Any, Any]:
        return self._check(*self._start(state, args), self._most_under_way)

    def finish(self, state: Any) -> Any:
        """Returns the state after all steps. If steps run ahead, call this at the end, and before saving the state."""
        return self._check(state, None, 0)[0]

    def _start(self, state: Any, args: tuple) -> tuple[Any, Any]:
        if self._capacities is None:
            self._capacities = _capacities_of(state)
        if self._false is None:
            self._false = _adaptive_state(state).step < 0  # on the devices of the state
        flag = self._under_way[-1][1]["overflowed"] if self._under_way else self._false
        capacities = tuple(self._capacities)
        self._visited.add(capacities)
        with (
            argument_errors(self._step, (state, *args), "bind what is no array with functools.partial"),
            option_errors(self._compiler_options),
        ):
            state, out, report = self._jitted(state, capacities, flag, *args)
        self._under_way.append((args, report))
        return state, out

    def _check(self, state: Any, out: Any, most_under_way: int) -> tuple[Any, Any]:
        """Read the flags of all steps but the last `most_under_way`, and repeat the steps that overflowed."""
        while len(self._under_way) > most_under_way:
            report = jax.device_get(self._under_way[0][1])
            self._needs.append(report["rungs"])
            if report["overflowed"]:
                self.replays += 1
                self._raise_capacities()
                to_repeat, self._under_way = self._under_way, []
                for args, _ in to_repeat:
                    state, out = self._start(state, args)
            else:
                self._under_way.pop(0)
                if len(self._needs) >= self._window:
                    self._lower_capacities(split_layers(state)[0])
        return state, out

    def _raise_capacities(self) -> None:
        """Raise capacities to cover all recorded needs; none falls."""
        pairs = [zip(now, new, strict=True) for now, new in zip(self._capacities or [], self._needed(), strict=True)]
        self._capacities = [tuple(None if a is None or b is None else max(a, b) for a, b in group) for group in pairs]

    def _lower_capacities(self, all_layers: list[Layers]) -> None:
        """Take the capacities that are needed if they save enough, and forget the needs."""
        assert self._capacities is not None
        needed = self._needed()
        now, new = (
            sum(layers.nbytes() for layers in _with_capacities(all_layers, capacities))
            for capacities in (self._capacities, needed)
        )
        if new < (1 - self._saving) * now:
            self._capacities = needed
        self._needs = []

    def _needed(self) -> Capacities:
        """The capacities that cover all recorded needs. Arrays without a need, since they were not used, are stored raw."""
        highest = [np.max(rungs, 0) for rungs in zip(*self._needs, strict=True)]
        return [tuple(self._capacity(int(rung)) for rung in rungs) for rungs in highest]

    def _capacity(self, rung: int) -> float | None:
        """The capacity, with the safety margin, for an array that needed `LADDER[rung]`; None if it has to be stored raw."""
        if not 0 <= rung < len(LADDER):
            return None
        # The need is at most a rung's capacity, and more than that of the rung below.
        least = max(LADDER[rung], self._margin * LADDER[max(rung - 1, 0)])
        return next((capacity for capacity in LADDER if capacity >= least), None)


def _capacities_of(tree: Any) -> Capacities:
    all_layers = split_layers(tree)[0]
    if not all_layers:
        raise ValueError("state must contain the Layers that memjax.compress.layers made.")
    return [layers.bits_per_value for layers in all_layers]


def _with_capacities(tree: Any, capacities: Capacities) -> Any:
    """Replaces the capacities of the `Layers` in a tree."""
    all_layers, rebuild = split_layers(tree)
    pairs = zip(all_layers, capacities, strict=True)
    return rebuild([dataclasses.replace(layers, bits_per_value=bits) for layers, bits in pairs])


def _adaptive_state(tree: Any) -> AdaptiveState:
    is_state = lambda node: isinstance(node, AdaptiveState)
    states = [node for node in jax.tree.leaves(tree, is_leaf=is_state) if is_state(node)]
    if len(states) != 1:
        raise ValueError(f"state must contain one state of memjax.compress.adaptive, got {len(states)}.")
    return states[0]
