"""`jax.lax.scan` whose backward pass keeps within a memory budget, at the least recomputation.

Gruslys et al. 2016, "Memory-Efficient Backpropagation Through Time".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from memjax._core import check
from memjax._core.arrays import as_array, is_float, zeros
from memjax._core.backward.derivatives import Static, differentiated_as, perturbed, refusing_forward_mode
from memjax._core.clear_errors import call_errors
from memjax._core.lists import Arrays, drop, merge, pick, spread
from memjax._core.program.jaxpr import with_axes
from memjax._plan.schedule.choose import Costs, check_budget, exact
from memjax._plan.schedule.execute import Execution
from memjax._plan.schedule.schedule import Strategy
from memjax._plan.schedule.store import StateCodec
from memjax._plan.schedule.unroll import Unroll, unrolls
from memjax.remat._scan.filling import compiled_bytes, filling, output_bytes, said, with_unroll
from memjax.remat._scan.step import ScanBlocks, Step, StepBackward, trace_step
from memjax.remat._scan.ways import Way, Ways

_STRATEGIES = (None, "hidden", "internal", "mixed")
_FORWARD_MODE = (
    "memjax.remat.scan cannot be differentiated in forward mode (jax.jvp, jax.jacfwd, jax.linearize). Use "
    "jax.lax.scan there (nnx.RNN, nn.RNN), which keeps nothing per step then; or reverse mode: jax.grad, jax.vjp, "
    "jax.jacrev, and jax.jvp or jax.jacfwd of those"
)


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    slots: int | None = None,
    budget: int | str | None = None,
    strategy: Strategy | None = None,
    costs: Costs | None = None,
    codec: StateCodec | None = None,
) -> tuple[Any, Any]:
    """`jax.lax.scan(f, init, xs, length, reverse, unroll)`, differentiated in reverse within a memory budget.

    Args:
      f: the step, `(carry, x) -> (carry, y)`, as for `jax.lax.scan`. What it closes over is differentiated too.
      init: the first carry: a pytree of arrays of any shapes and dtypes, typed PRNG keys included.
      xs: a pytree of arrays of shape (length, ...), or None.
      length: the number of steps; needed where `xs` has no arrays.
      reverse: run from the last row of `xs` to the first.
      unroll: how many steps one iteration of a loop takes, as for `jax.lax.scan`, wherever steps simply follow each other: in the
        forward pass and in blocks. The steps that a schedule for `slots` repeats, and backpropagates, stay one to an iteration.
        With a `budget` and 1, small steps on a GPU run five to an iteration.
      slots: memory in units of one carry, the first state's included: exactly the schedule
        `memjax.remat.schedule(length, slots, strategy=strategy, internal_size=a)` runs, step by step, where a kept
        internal state takes a = 1 + ceil(r / s) units: r bytes of a step's residuals, s bytes of a carry. What `f` hands
        on unchanged is no part of the carry here: it is taken as closed over, and given back as it is.
      budget: memory in bytes, or a text like "64MiB", or "min": the least possible. It is for the temporary memory of the
        scan's value and gradient as compiled by itself, per device: what is kept for the backward pass, the working memory of a
        step, and `ys` with their cotangents, beyond `xs`, `init`, what `f` closes over, and the gradients of these. Of the plans
        that fit, the fastest by `costs` runs. It is found when the scan is differentiated, and compiled up to five times,
        mostly once or twice; up to twenty times for small steps on a GPU. Give exactly one of `slots` and `budget`.
      strategy: what `slots` may hold: "hidden" states, "internal" states (of which each takes one slot, whatever its size),
        or both ("mixed"). None: "hidden" or "mixed", whichever is predicted to be faster, and "hidden" where residuals
        cannot be cut into arrays like the carry's leaves.
      codec: encodes the floats of states in slots, such as a `memjax.compress.Codec`; with `slots` and the "hidden"
        strategy, which it makes the default. Results are exact. Steps are recomputed from what is decoded, and states that
        this leads to are encoded again, so gradients are those at inexact states.
      costs: seconds to predict with, as `memjax.remat.profile` measures them; by default a rough model of the step.

    Returns:
      `(carry, ys)`, as `jax.lax.scan`.

    Saved between forward and backward: `init`, `xs` and what `f` closes over, which exist anyhow, the slots, and the
    residuals of the last steps. A step's residuals are the smallest set of values, r bytes, from which its backward
    pass follows without repeating matrix products and the like; what depends on parameters alone is no part of them.
    A `budget` may keep less of a step, its carry alone at the least, and run it again where it is backpropagated.

    Memory: `jax.lax.scan` keeps length * r or more. Here `slots` carries and one step's residuals, slots * s + r;
    or, by `budget`, blocks of L steps with the state before each: (length / L) s + L r for one more forward pass,
    and less than that for more passes. With `slots` the step's own working memory and the gradients come on top.

    Time: n = `length` steps run forward once more where (n / L) s + L r fits beside outputs and a step's working memory, so from
    about 2 sqrt(n s r) bytes on; at most twice more from about 3 (n s^2 r)^(1/3) on. Less takes more: with m slots about
    (m! n)^(1/m) times, so that the least budget of a long scan can take a hundred times as long. A UserWarning says how often a
    step runs forward where that is more than ten times; `memjax.remat.schedule(length, slots).forward_steps` says it ahead.

    With `codec` a slot takes the bytes of a code instead of s.

    What is recomputed runs its effects again: a `jax.debug.callback` or `jax.debug.print` in `f` may run more than once for
    a step, in the backward pass as well.

    Not supported, where `jax.lax.scan` has it: forward-mode differentiation; a traced `length`, also with
    `jax.disable_jit`. Some texts of errors differ from those of `jax.lax.scan`, and the program is no single `scan`
    equation: with JAX 0.10 an undifferentiated call is a `custom_vjp_call`.

    Derivatives of the gradient exist (forward over reverse as well) and are those of `jax.lax.scan` over
    `jax.checkpoint(f)`, without `codec`: they keep a few carries per step, one more than that, whatever the budget.

    Raises:
      ValueError: both or neither of `slots` and `budget`; a budget that nothing fits (the message gives the least
        possible and its cost); a `strategy`, `slots`, `length`, `unroll` or `budget` out of range; `xs` of different lengths, or
        no length at all.
      TypeError: what is no array in `init` or `xs`; a carry whose structure or type changes; forward-mode
        differentiation (`jax.jvp`, `jax.jacfwd`, `jax.linearize`), for which `jax.lax.scan` keeps nothing per step
        anyway.

    Source: Gruslys et al. 2016, section 3.
    """
    check.function("f", f, arguments=2)
    init, xs = check.arrays("init", init), check.arrays("xs", xs)
    length = _length(xs, length)
    slots, budget = check_memory(slots, budget)
    if budget is not None:
        check.known_sizes("remat.scan", (init, xs))
    check.choice("strategy", strategy, _STRATEGIES)
    check.flag("reverse", reverse)
    if not isinstance(unroll, bool):
        unroll = check.integer("unroll", unroll, least=0, what="True, False or a number of steps")
    if costs is not None and not isinstance(costs, Costs):
        raise check.fail(
            TypeError, "costs", "a memjax.remat.Costs or None", costs, "memjax.remat.profile measures them"
        )
    if codec is not None:
        if slots is None or strategy not in (None, "hidden"):
            raise check.fail(ValueError, "codec", 'None without slots or with another strategy than "hidden"', codec)
        for name in ("encode", "decode"):
            check.function(f"codec.{name}", getattr(codec, name, None))
        strategy = "hidden"
    if length == 0:
        return lax.scan(f, init, xs, length, reverse, unroll)

    step, init_leaves = trace_step(f, init, xs)
    carry_tree, moving, constant = step.carry_tree, step.moving, drop(init_leaves, step.moving)
    if constant:

        def smaller(carry: Arrays, x: Any) -> tuple[Arrays, Any]:
            carry, y = f(jax.tree.unflatten(carry_tree, merge(carry, constant, moving)), x)
            return pick(jax.tree.leaves(carry), moving), y

        step, init_leaves = trace_step(smaller, pick(init_leaves, moving), xs)
    if codec is not None:
        _check_codec(codec, init_leaves)
    xs_leaves = jax.tree.leaves(xs)
    if slots is None:
        everything = StepBackward(step, [is_float(jax.typeof(c)) for c in step.consts], [is_float(x) for x in step.x])
        check_budget(budget, length, step.carry_nbytes, everything.kept_nbytes)

    def plan(backward: StepBackward) -> Way:
        if slots is not None:
            known = costs if costs or strategy is None else Costs(0.0, 0.0, 0.0, 0.0, 0.0)  # which nothing depends on
            table = exact(backward.steps(length), slots, strategy, known or Ways(backward, None).costs)
            return Way(backward, table, Unroll(unroll, unroll))
        assert budget is not None
        ways, outputs = Ways(backward, costs), output_bytes(length, backward)

        def found(unroll: Unroll, worth: Callable[[Way], bool] | None) -> Way | None:
            return filling(
                budget,
                ways.least(length),
                lambda room: ways.fastest(length, room)._replace(unroll=unroll),
                lambda way: compiled_bytes(way, init_leaves, xs_leaves, reverse),
                outputs,
                worth=worth,
            )

        room = max(budget - outputs if isinstance(budget, int) else 0, ways.least(length))
        turns = unrolls(unroll, [*step.consts, *step.carry, *step.x, *backward.kept], least=budget == "min")
        expected = functools.cache(lambda: ways.seconds(ways.fastest(length, room)))
        return said(with_unroll(turns, found, ways.seconds, expected))

    run = refusing_forward_mode(_differentiable(step, plan, length, reverse, unroll, codec), _FORWARD_MODE)
    carry, ys = run(step.consts, init_leaves, xs_leaves)
    return jax.tree.unflatten(carry_tree, merge(carry, constant, moving)), jax.tree.unflatten(step.y_tree, ys)


def check_memory(slots: int | None, budget: int | str | None) -> tuple[int | None, int | str | None]:
    """`slots` and `budget` as Python numbers; exactly one of them must be given."""
    check.exactly_one(slots=slots, budget=budget)
    if slots is not None:
        return check.integer("slots", slots, least=1, what="a number of carries"), None
    return None, check.byte_count("budget", budget, words=("min",))


def _check_codec(codec: StateCodec, state: Arrays) -> None:
    """Raises if what the codec decodes is no array like the one that it was given."""
    for leaf in state:
        if is_float(jax.typeof(leaf)):
            with call_errors("codec", codec, {"a state": leaf}):
                out = jax.eval_shape(lambda x: codec.decode(codec.encode(x)), leaf)
            if (getattr(out, "shape", None), getattr(out, "dtype", None)) != (leaf.shape, leaf.dtype):
                wanted = f"one that decodes {leaf.dtype}{list(leaf.shape)} where that was encoded"
                raise check.fail(TypeError, "codec", wanted, codec, f"decode gives {check.shown(out)}")


def _differentiable(
    step: Step,
    plan: Callable[[StepBackward], Way],
    length: int,
    reverse: bool,
    unroll: int | bool,
    codec: StateCodec | None,
) -> Callable[..., Any]:
    """The scan as a function of (consts, init, xs), flat, with a backward pass that keeps what `plan` says."""

    def plain(body, consts, init, xs):
        return lax.scan(lambda carry, x: body(consts, carry, x), init, xs, length, reverse, unroll)

    step_again = jax.checkpoint(step.run)

    @jax.custom_vjp
    def run(consts, init, xs):
        return plain(step.run, consts, init, xs)

    def run_forward(consts, init, xs):
        check.known_sizes("remat.scan", [argument.value for group in (consts, init, xs) for argument in group])
        chosen = _Chosen(step, plan, perturbed(consts), perturbed(xs))
        # jax.linearize hands Python numbers on as they are.
        values = [[as_array(argument.value) for argument in group] for group in (consts, init, xs)]

        def fast(consts, init, xs):
            blocks = ScanBlocks(chosen.backward, consts, xs, length, reverse, chosen.unroll)
            carry, ys, saved = Execution(chosen.plan, blocks, codec).forward(init)
            return (carry, ys), saved

        out, saved = differentiated_as(functools.partial(plain, step_again), fast, replaced=codec is None)(*values)
        return out, (chosen, values, saved)

    def run_backward(residuals, cotangents):
        chosen, values, saved = residuals
        backward, wrt = chosen.backward, chosen.wrt
        n_carry = len(step.carry)
        ct_carry = [zeros(ct.aval) if _is_zero(ct) else ct for ct in pick(cotangents[0], backward.wrt_carry)]
        ct_ys = [None if _is_zero(ct) else ct for ct in pick(cotangents[1], backward.out_float[n_carry:])]

        def fast(values, saved, ct_carry, ct_ys):
            consts, _, xs = values
            blocks = ScanBlocks(backward, consts, xs, length, reverse, chosen.unroll)
            return blocks.pull_back(Execution(chosen.plan, blocks, codec), saved, ct_carry, ct_ys), ()

        def reference(values, saved, ct_carry, ct_ys):
            def floats(*chosen_values):
                full = [merge(c, drop(v, m), m) for c, v, m in zip(chosen_values, values, wrt, strict=True)]
                carry, ys = plain(step_again, *full)
                wanted = [ct is not None for ct in ct_ys]
                return pick(carry, backward.wrt_carry), pick(pick(ys, backward.out_float[n_carry:]), wanted)

            _, vjp = jax.vjp(floats, *map(pick, values, wrt))
            return vjp((ct_carry, [ct for ct in ct_ys if ct is not None]))

        both = with_axes(differentiated_as(reference, fast, replaced=codec is None), step.axes)
        cts, _ = both(values, saved, ct_carry, ct_ys)
        return tuple(map(spread, cts, wrt))

    run.defvjp(run_forward, run_backward, symbolic_zeros=True)
    return run


@jax.tree_util.register_static
class _Chosen(Static):
    """What is differentiated, and how: static, so that it can travel from the forward to the backward rule."""

    def __init__(self, step: Step, plan: Callable[[StepBackward], Way], consts: tuple[bool, ...], xs: tuple[bool, ...]):
        super().__init__((id(step), consts, xs))
        self.backward, self.plan, self.unroll = plan(StepBackward(step, consts, xs))
        self.wrt = (self.backward.wrt_consts, self.backward.wrt_carry, self.backward.wrt_x)


def _is_zero(ct: Any) -> bool:
    return isinstance(ct, jax.custom_derivatives.SymbolicZero)


def _length(xs: Any, length: int | None) -> int:
    lengths = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(xs):
        name = f"xs{jax.tree_util.keystr(path)}"
        if not leaf.ndim:
            raise check.fail(ValueError, name, "an array with a leading axis to scan over", leaf)
        lengths[name] = len(leaf)
    if length is not None:
        lengths["length"] = check.integer("length", length, least=0, what="a number of steps")
    if not lengths:
        raise ValueError("length must be given where xs has no arrays, got None")
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name}: {n}" for name, n in lengths.items())
        raise ValueError(f"xs and length must agree on the number of steps, got {counts}")
    return next(iter(lengths.values()))
