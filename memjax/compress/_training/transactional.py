"""Steps that an overflow cannot spoil: it changes nothing, and the step is done again with more room."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check
from memjax._core.clear_errors import argument_errors, call_errors
from memjax.compress._training.adaptive import AdaptiveState
from memjax.compress._training.layers import LADDER, Layers, check_bits, split_layers

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
    """A training step whose codes may overflow: the step then happens again, with the same arguments and more capacity.

    An overflow leaves the state as it was, all of it: parameters, optimizer, running statistics and keys. That is decided on the
    device; the host reads one flag per step and calls the next rung of the ladder for what overflowed, as far up as
    the codes needed; the top rung stores raw values and cannot overflow. So the results are those of a run with
    enough capacity from the beginning, bit for bit.

    Capacities begin with those of the `Layers` in the state, which stay as they are. They are part of the compiled program:
    `jit` keeps one for each set of capacities. They rise with overflows, and fall where a whole `window` of steps would
    have done with `saving` less memory for codes. New ones are the rung of `LADDER` above `margin` times the need, which is
    known to within a rung.

    Reading the flag waits for the step. With `ahead`, the flag is read when the next step is under way, so that the device
    is never idle: if it says that the step overflowed, the next one has changed nothing either, and both are done again. So
    the state is always that of whole steps, but of all but the last one for sure: `finish` waits for that. Of a step
    that is done again, `out` was returned before: what follows from the forward pass is right in it, what follows from
    the gradients is not.

    Args:
      step: `(state, *args) -> (state, out)`, pure; updates the state with `adaptive`, whose state it contains beside the
        `Layers`.
      margin: capacity over need.
      window: steps whose needs are remembered.
      saving: share of all codes' bytes that is worth compiling again.
      donate: the state passed in is used up.
      ahead: whether a step begins before it is known that the one before it did not overflow; its other arguments are kept
        until then.
      compiler_options, jit_options: of `jax.jit`.

    Returns:
      A function `(state, *args) -> (state, out)`, with attributes `replays` (how often a step overflowed) and
      `compiled` (sets of capacities so far), and methods `finish(state)`, which gives the state after all steps, and
      `lower(state, *args)` as of `jax.jit`, of a function that is also told, after the state, whether an earlier step overflowed.

    Raises:
      ValueError: `margin` is below 1, `window` below 1 or `saving` is not between 0 and 1; called with a state that has no
        `Layers` or no state of `adaptive`, or a step that returns a state of another structure.
      TypeError: options of the wrong kind; when called, a step that returns no pair, or arrays of other types in the state.
    """
    check.compiler_options(compiler_options)
    for name in jit_options.keys() & {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames"}:
        raise check.fail(TypeError, name, "left out", jit_options[name], "bind what is static with functools.partial")
    return Transactional(
        step, margin, window, saving, donate, ahead, {"compiler_options": compiler_options, **jit_options}
    )


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
        self._step = step
        self._needs: list[list[np.ndarray]] = []
        self._capacities: Capacities | None = None
        self.replays = 0
        self._visited: set[Any] = set()
        self._most_under_way = 1 if ahead else 0
        # Arguments and reports of steps that may have overflowed. Each is told of the one before it.
        self._under_way: list[tuple[tuple, dict[str, Any]]] = []
        self._no: Any = None

        def gated(state, capacities, is_void, *args):
            given = _capacities_of(state)
            roomy = _with_capacities(state, capacities)
            with call_errors("step", step, {"the state": roomy, "arguments": args}):
                result = step(roomy, *args)
            if not (isinstance(result, tuple | list) and len(result) == 2):
                raise check.fail(TypeError, "step", "a function that returns a pair", result, _STEP)
            new, out = result
            before, after = str(jax.tree.structure(roomy)), str(jax.tree.structure(new))
            if before != after:
                raise ValueError(f"step must return a state of the structure that it gets, {before}, got {after}")
            for (path, old), leaf in zip(jax.tree_util.tree_leaves_with_path(roomy), jax.tree.leaves(new), strict=True):
                old, leaf = jax.typeof(old), jax.typeof(leaf)
                if (old.shape, old.dtype) != (leaf.shape, leaf.dtype):
                    name = f"state{jax.tree_util.keystr(path)}"
                    raise TypeError(
                        f"step must return {name} of the type that it gets, {old.str_short()}, got {leaf.str_short()}"
                    )
            last = _adaptive_state(new).last
            overflowed = is_void | jnp.any(jnp.stack([jnp.any(found.overflows > 0) for found in last]))
            new = _with_capacities(new, given)
            kept = jax.tree.map(lambda before, after: jnp.where(overflowed, before, after), state, new)
            report = {"overflowed": overflowed, "rungs": [found.rung for found in last]}
            return kept, out, report

        # Capacities are put into the state where it is traced: states are large trees, and every step would rebuild them.
        self._jitted = jax.jit(gated, static_argnums=1, donate_argnums=(0,) if donate else (), **options)

    def __repr__(self) -> str:
        return f"Transactional(replays={self.replays}, compiled={self.compiled}, capacities={self._capacities})"

    @property
    def compiled(self) -> int:
        return len(self._visited)

    @property
    def capacities(self) -> Capacities | None:
        """Bits per value that the next step begins with, by `Layers` and array; None: those of the state."""
        return self._capacities

    @capacities.setter
    def capacities(self, new: Capacities) -> None:
        if not isinstance(new, list) or not all(isinstance(group, tuple | list) for group in new):
            wanted = "a list with a tuple of bits per value for each Layers"
            raise check.fail(TypeError, "capacities", wanted, new)
        for bits in (bits for group in new for bits in group):
            check_bits(bits)
        self._capacities = [tuple(group) for group in new]

    def trace(self, state: Any, *args: Any) -> Any:
        """The step as the next call will run it, traced as by `jax.jit(step).trace`."""
        capacities = self._capacities or _capacities_of(state)
        place = getattr(_adaptive_state(state).step, "sharding", None)
        is_void = jax.ShapeDtypeStruct((), bool, sharding=place)
        return self._jitted.trace(state, tuple(capacities), is_void, *args)

    def lower(self, state: Any, *args: Any) -> Any:
        return self.trace(state, *args).lower()

    def __call__(self, state: Any, *args: Any) -> tuple[Any, Any]:
        return self._checked(*self._start(state, args), self._most_under_way)

    def finish(self, state: Any) -> Any:
        """The state after all steps, for sure: before it is saved, or at the end, if steps run ahead."""
        return self._checked(state, None, 0)[0]

    def _start(self, state: Any, args: tuple) -> tuple[Any, Any]:
        if self._capacities is None:
            self._capacities = _capacities_of(state)
        if self._no is None:
            self._no = _adaptive_state(state).step < 0  # where the state is
        is_void = self._under_way[-1][1]["overflowed"] if self._under_way else self._no
        capacities = tuple(self._capacities)
        self._visited.add(capacities)
        with argument_errors(self._step, (state, *args), {}, (), "bind what is no array with functools.partial"):
            state, out, report = self._jitted(state, capacities, is_void, *args)
        self._under_way.append((args, report))
        return state, out

    def _checked(self, state: Any, out: Any, most_under_way: int) -> tuple[Any, Any]:
        """Until no more steps than that may have overflowed."""
        while len(self._under_way) > most_under_way:
            report = jax.device_get(self._under_way[0][1])
            self._needs.append(report["rungs"])
            if report["overflowed"]:
                self.replays += 1
                self._capacities = self._raised()
                again, self._under_way = [args for args, _ in self._under_way], []
                for args in again:
                    state, out = self._start(state, args)
            else:
                self._under_way.pop(0)
                if len(self._needs) >= self._window:
                    self._lower_capacities(split_layers(state)[0])
        return state, out

    def _raised(self) -> Capacities:
        """Capacities for all needs remembered, none lower than it is."""
        wanted = self._wanted()
        pairs = [zip(now, new, strict=True) for now, new in zip(self._capacities or [], wanted, strict=True)]
        return [tuple(None if a is None or b is None else max(a, b) for a, b in group) for group in pairs]

    def _lower_capacities(self, own: list[Layers]) -> None:
        assert self._capacities is not None
        wanted = self._wanted()
        now, new = (
            sum(layers.nbytes() for layers in _with_capacities(own, some)) for some in (self._capacities, wanted)
        )
        if new < (1 - self._saving) * now:
            self._capacities = wanted
        self._needs = []

    def _wanted(self) -> Capacities:
        """The rungs above the needs remembered. Without one nothing is known: raw."""
        most = [np.max(group, 0) for group in zip(*self._needs, strict=True)]
        return [tuple(self._capacity(int(rung)) for rung in rungs) for rungs in most]

    def _capacity(self, rung: int) -> float | None:
        if not 0 <= rung < len(LADDER):
            return None
        # The need is at most a rung's capacity, and more than that of the rung below.
        least = max(LADDER[rung], self._margin * LADDER[max(rung - 1, 0)])
        above = [capacity for capacity in LADDER if capacity >= least]
        return above[0] if above else None


def _capacities_of(tree: Any) -> Capacities:
    own = split_layers(tree)[0]
    if not own:
        raise ValueError("state must contain the Layers that memjax.compress.layers made.")
    return [layers.bits_per_value for layers in own]


def _with_capacities(tree: Any, capacities: Capacities) -> Any:
    """The tree with `Layers` of these capacities."""
    own, rebuild = split_layers(tree)
    return rebuild([dataclasses.replace(a, bits_per_value=b) for a, b in zip(own, capacities, strict=True)])


def _adaptive_state(tree: Any) -> AdaptiveState:
    is_state = lambda node: isinstance(node, AdaptiveState)
    found = [node for node in jax.tree.leaves(tree, is_leaf=is_state) if is_state(node)]
    if len(found) != 1:
        raise ValueError(f"state must contain one state of memjax.compress.adaptive, got {len(found)}.")
    return found[0]
