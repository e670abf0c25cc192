"""`jax.lax.scan` whose backward pass keeps within a memory budget, at the least recomputation.

Gruslys et al. 2016, "Memory-Efficient Backpropagation Through Time".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax.remat._blocks import Blocks, zeros
from memjax.remat._choose import Costs, choose, exact
from memjax.remat._execute import forward, pull_back
from memjax.remat._plan import Plan
from memjax.remat._schedule import STRATEGIES, Strategy
from memjax.remat._step import Backward, Step, is_float, merge, pick, trace_step

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    slots: int | None = None,
    budget: int | str | None = None,
    strategy: Strategy = "mixed",
    costs: Costs | None = None,
) -> tuple[Any, Any]:
    """`jax.lax.scan(f, init, xs, length, reverse=reverse)`, differentiated in reverse within a memory budget.

    Args:
      f: the step, `(carry, x) -> (carry, y)`, as for `jax.lax.scan`. What it closes over is differentiated
      too.
      init: the first carry: a pytree of arrays of any dtype, typed PRNG keys included.
      xs: a pytree of arrays with the scanned axis first, or None.
      length: the number of steps; needed where `xs` has no arrays.
      reverse: run from the last row of `xs` to the first.
      slots: memory in units of one carry, the first state's included: the schedule of
        `memjax.remat.schedule(length, slots, strategy=strategy, internal_size=...)` runs, step by step. A
        kept internal state costs `internal_size = 1 + ceil(residual bytes of a step / bytes of a carry)`
        units.
      budget: memory in bytes, or a text like "64MiB". It counts all that is kept for the backward pass beyond
        `xs`, `init`, what `f` closes over, and outputs: stored carries and residuals. The schedule of the
        least predicted time runs. Exactly one of `slots` and `budget` is to be given.
      strategy: what `slots` may hold: "hidden" states, "internal" states, or both ("mixed", "mixed-shared").
      costs: times to predict with, as `memjax.remat.profile` measures them; by default a rough model of the
      step.

    Returns:
      `(carry, ys)`, as `jax.lax.scan`.

    Memory: with slots of s bytes (one carry) and residuals of r bytes per step, r being the smallest set of
    values from which a step's backward pass follows without repeating matrix products and the like: a plain
    scan keeps length * r. Here, blocks of L steps, each start kept: (length / L) s + L r, with one more
    forward pass; less memory with more passes. Gradients add their own size, and the step's own working
    memory comes on top.

    Raises:
      ValueError: both or neither of `slots` and `budget`; a budget that nothing fits (the message says what
        would); `xs` of different lengths, or no length at all.
      TypeError: a carry whose structure or type changes; forward-mode differentiation (`jax.jvp`,
        `jax.jacfwd`), for which `jax.lax.scan` needs no memory anyway.
    """
    length = _length(xs, length)
    if (slots is None) == (budget is None):
        raise ValueError(f"give exactly one of slots and budget, got slots={slots!r} and budget={budget!r}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if slots is not None and slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}")
    if length == 0:
        return lax.scan(f, init, xs, length, reverse=reverse)

    step, init_leaves = trace_step(f, init, xs)
    xs_leaves = jax.tree.leaves(xs)
    whole = Backward(step, [is_float(jax.typeof(c)) for c in step.consts], [is_float(x) for x in step.x])
    if slots is not None:
        plan = exact(length, slots, strategy, whole.kept_nbytes, step.carry_nbytes)
    else:
        assert budget is not None
        plan = choose(length, parse_bytes(budget), step, whole, costs)
    run = _differentiable(step, plan, length, reverse)
    try:
        carry, ys = run(step.consts, init_leaves, xs_leaves)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "memjax.remat.scan cannot be differentiated in forward mode; use jax.lax.scan there, which "
            "keeps nothing per step then. jax.vjp, jax.grad and jax.jacrev work, and jax.jacfwd of them"
        ) from error
    return jax.tree.unflatten(step.carry_tree, carry), jax.tree.unflatten(step.y_tree, ys)


def _differentiable(step: Step, plan: Plan, length: int, reverse: bool) -> Callable[..., Any]:
    @jax.custom_vjp
    def run(consts, init, xs):
        return lax.scan(lambda carry, x: step.run(consts, carry, x), init, xs, length, reverse=reverse)

    def run_forward(consts, init, xs):
        chosen = _Chosen(_differentiated(consts), _differentiated(xs))
        consts, init, xs = ([argument.value for argument in group] for group in (consts, init, xs))
        carry, ys, saved = forward(plan, Blocks(step, consts, xs, length, reverse), chosen.backward(step), init)
        return (carry, ys), (chosen, consts, xs, saved)

    def run_backward(residuals, cotangents):
        chosen, consts, xs, saved = residuals
        backward = chosen.backward(step)
        ct_carry, ct_ys = cotangents
        n_carry = len(step.carry)
        ct_carry = [_instantiate(ct) for ct in pick(ct_carry, backward.wrt_carry)]
        ct_ys = [None if _is_zero(ct) else ct for ct in pick(ct_ys, backward.out_float[n_carry:])]
        blocks = Blocks(step, consts, xs, length, reverse)
        cts = pull_back(plan, blocks, backward, saved, ct_carry, ct_ys)
        masks = (backward.wrt_consts, backward.wrt_carry, backward.wrt_x)
        return tuple(merge(ct, [None] * (len(mask) - sum(mask)), mask) for ct, mask in zip(cts, masks, strict=True))

    run.defvjp(run_forward, run_backward, symbolic_zeros=True)
    return run


@jax.tree_util.register_static
class _Chosen:
    """Which consts and xs a gradient is asked for; static, to go from the forward to the backward rule."""

    def __init__(self, consts: list[bool], xs: list[bool]):
        self.key = (tuple(consts), tuple(xs))
        self._backward: Backward | None = None

    def backward(self, step: Step) -> Backward:
        if self._backward is None:
            self._backward = Backward(step, *self.key)
        return self._backward

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Chosen) and self.key == other.key


def _differentiated(arguments: list[Any]) -> list[bool]:
    return [argument.perturbed and is_float(argument.value) for argument in arguments]


def _is_zero(ct: Any) -> bool:
    return isinstance(ct, jax.custom_derivatives.SymbolicZero)


def _instantiate(ct: Any) -> Any:
    return zeros(ct.aval) if _is_zero(ct) else ct


def _length(xs: Any, length: int | None) -> int:
    lengths = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(xs):
        if not jnp.ndim(leaf):
            raise ValueError(f"xs{jax.tree_util.keystr(path)} has no axis to scan over: it is a scalar")
        lengths[f"xs{jax.tree_util.keystr(path)}"] = jnp.shape(leaf)[0]
    if length is not None:
        lengths["length"] = int(length)
    if not lengths:
        raise ValueError("scan needs a length: xs has no arrays, and length is None")
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{name}: {n}" for name, n in lengths.items())
        raise ValueError(f"xs and length must agree on the number of steps, got {given}")
    return next(iter(lengths.values()))


def parse_bytes(budget: int | str) -> int:
    """Bytes from a number or a text like "64MiB" or "1.5GB"."""
    if isinstance(budget, str):
        for unit in sorted(_UNITS, key=len, reverse=True):
            if budget.endswith(unit):
                try:
                    return int(float(budget.removesuffix(unit)) * _UNITS[unit])
                except ValueError:
                    break
        raise ValueError(f'budget must be bytes or a text like "64MiB" (units {", ".join(_UNITS)}), got {budget!r}')
    if budget < 0:
        raise ValueError(f"budget must not be negative, got {budget}")
    return int(budget)
