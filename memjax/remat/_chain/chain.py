"""A chain of blocks whose backward pass keeps within a memory budget, at the least recomputation.

Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited
memory" (rotor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from memjax._core import check
from memjax._core.clear_errors import call_errors
from memjax._core.lists import Arrays
from memjax._plan.result import Plan
from memjax.remat._chain.block import Block, estimates, measured
from memjax.remat._chain.schedule import ChainSchedule, chain_schedule, checked_costs
from memjax.remat._chain.solvers import BlockCost, blocks_of
from memjax.remat._chain.within import Whole, ahead, within

_FORWARD_MODE = (
    "memjax.remat.chain cannot be differentiated in forward mode (jax.jvp, jax.jacfwd, jax.linearize). Call the blocks one "
    "after the other there (nnx.Sequential, nn.Sequential), which keeps nothing then; or use reverse mode: jax.grad, "
    "jax.vjp, jax.jacrev, and jax.jacfwd of those"
)


def chain(
    blocks: Sequence[Callable[[Any, Any], Any]],
    params: Sequence[Any],
    x: Any,
    *,
    budget: int | str | None = None,
    schedule: Plan | ChainSchedule | None = None,
    costs: Sequence[BlockCost] | None = None,
    has_aux: bool = False,
) -> Any:
    """`for f, p in zip(blocks, params): x = f(p, x)`, differentiated in reverse within a memory budget.

    Args:
      blocks: functions `(params, x) -> x`. What they close over is differentiated too. Blocks may differ in everything;
        equal ones (the same function, parameters and input of the same shapes) are traced once.
      params: the parameters of each block: pytrees of arrays of any dtype.
      x: the first block's input, a pytree of arrays of any dtype, typed PRNG keys included.
      budget: memory in bytes, or a text like "12GiB", or "min" for the least possible: for all that exists at one moment of
        the forward or backward pass beyond `x`, the parameters and their gradients. That is the temporary memory of the
        chain's value and gradient as compiled by itself, with its output or that one's gradient. What the rest of the step
        takes comes on top. Inside `shard_map` all is that of one device, and twice the gradients that are summed over devices
        are set aside for these sums.
      schedule: what to keep, as `chain_plan` or `chain_schedule` found it. Exactly one of `budget` and `schedule` is to be given.
      costs: of each block, with `budget`: then `chain_schedule(costs, budget)` decides, by these numbers alone, and nothing is
        compiled. `chain_costs(blocks, params, x)` estimates them, `chain_costs(..., measure=True)` measures.
      has_aux: the blocks return `(x, aux)`, as for `jax.grad`: aux carries no gradient, and does not count.

    Returns:
      The last block's output; with `has_aux`, a pair of it and the list of what the blocks returned besides.

    Memory: within a budget the chain is planned as `memjax.plan` plans a loss, and cut where a block ends, inside of blocks as
    well. Of each stretch the arrays are kept that take the longest to recompute for their bytes, and what else the
    backward pass reads is recomputed when it gets there. So a block can keep everything, its input, or anything between. The plan
    is made when the chain is differentiated, once for each program, and compiled up to four times until it fills the budget,
    or twice as often where the compiler takes more than was predicted. Where no plan is small enough, groups of blocks of
    which the input is kept hold such groups themselves, each recomputed by a schedule of its own, as `chain_schedule` finds it.
    Recomputation waits for the gradient that needs it. On a CPU compile with `memjax.remat_compiler_options()`, or the
    compiler may undo the recomputation.

    By a `ChainSchedule`, a block of which everything is kept holds its output and the smallest set of values from which its
    backward pass follows without repeating matrix products and the like; a group of blocks holds its input.

    For many equal blocks with stacked parameters `memjax.remat.scan` is quicker to compile.

    Raises:
      ValueError: both or neither of `budget` and `schedule`; when differentiated, a budget below the least possible (the
        message states it, and the time there), or a plan of another chain; lengths that disagree.
      TypeError: with `has_aux`, a block that returns no pair; forward-mode differentiation (`jax.jvp`, `jax.jacfwd`).
    """
    budget, schedule = check_memory(budget, schedule)
    if costs is not None and budget is None:
        raise ValueError("costs decide what fits a budget: give budget as well, or leave costs out")
    for name, tree in (("params", params), ("x", x)):
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise check.fail(
                    TypeError, name, "arrays", leaf, "chain_plan takes types, or trace chain with jax.eval_shape"
                )
    traced, values, leaves = _trace(blocks, params, x, has_aux)
    if costs is not None:
        assert budget is not None
        costs = checked_costs(costs)
        if len(costs) != len(traced):
            raise ValueError(f"costs must have one entry per block, got {len(costs)} for {len(traced)} blocks")
        schedule = chain_schedule(costs, budget)
    if isinstance(schedule, ChainSchedule) and list(blocks_of(schedule.items)) != list(range(len(traced))):
        raise ValueError(f"schedule must be of {len(traced)} blocks in order, got {schedule.items}")
    outs = iter(within(Whole(traced, values, leaves), budget, schedule, _FORWARD_MODE))
    y = jax.tree.unflatten(traced[-1].y_tree, [next(outs) for _ in traced[-1].y])
    if not has_aux:
        return y
    return y, [jax.tree.unflatten(block.aux_tree, [next(outs) for _ in block.aux]) for block in traced]


def chain_plan(
    blocks: Sequence[Callable[[Any, Any], Any]],
    params: Sequence[Any],
    x: Any,
    *,
    budget: int | str,
    argnums: int | Sequence[int] = (0, 1),
    has_aux: bool = False,
) -> Plan | ChainSchedule:
    """What `chain` does within a budget, ahead and as data: `chain(blocks, params, x, schedule=plan)` acts on it.

    Args:
      blocks, params, x, budget, has_aux: as for `chain`; arrays or `jax.ShapeDtypeStruct`s. Nothing is run. Their shardings are
        those that the chain is compiled for, on the platform of their devices, which need not be there.
      argnums: what is differentiated: 0, all floats of `params` and of what the blocks close over; 1, those of `x`; or both.
        `argnums=0` is for a chain whose `x` is data.

    Returns:
      A `memjax.Plan`, or a `ChainSchedule` where that alone fits. It serves a chain of which less is differentiated, too, such as
      one with frozen parameters: nothing is computed or kept for the others then, but what is recomputed is what was planned.

    Raises:
      ValueError: as `chain`; `argnums` that are none of these, or choose no float.
      TypeError: as `chain`.
    """
    room = check.byte_count("budget", budget, words=("min",))
    numbers = [check.integer("argnums", one, what="0 (params), 1 (x), or both") for one in _as_sequence(argnums)]
    if not numbers or not {0, 1}.issuperset(numbers):
        raise check.fail(ValueError, "argnums", "0 (params), 1 (x), or both", argnums)
    return ahead(Whole(*_trace(blocks, params, x, has_aux)), room, sorted(set(numbers)))


def _as_sequence(argnums: Any) -> Sequence[Any]:
    return argnums if isinstance(argnums, Sequence) and not isinstance(argnums, str) else [argnums]


def check_memory(budget: Any, schedule: Any) -> tuple[int | str | None, Plan | ChainSchedule | None]:
    """`budget` in bytes and `schedule`, of which exactly one is given."""
    check.exactly_one(budget=budget, schedule=schedule)
    if budget is not None:
        return check.byte_count("budget", budget, words=("min",)), None
    if not isinstance(schedule, Plan | ChainSchedule):
        raise check.fail(TypeError, "schedule", "a Plan or a ChainSchedule", schedule, "chain_plan finds one")
    return None, schedule


def chain_costs(
    blocks: Sequence[Callable[[Any, Any], Any]],
    params: Sequence[Any],
    x: Any,
    *,
    has_aux: bool = False,
    measure: bool = False,
) -> list[BlockCost]:
    """What each block of a chain costs, for `chain_schedule` and `chain`: plain data, to keep.

    Args:
      blocks, params, x, has_aux: as for `chain`; arrays or, without `measure`, `jax.ShapeDtypeStruct`s.
      measure: time each distinct block where it runs (outside `jit`), instead of estimating its time from its operations:
        FLOPs, bytes moved, operations started. Takes some seconds for each, compilation for the most part.

    Returns:
      One `BlockCost` per block. All float leaves of `params` and `x` are taken to be differentiated. The working memory is
      that of the block compiled by itself, inside `shard_map` for as many local devices as its mesh has. Where there are
      fewer, or a block uses axes of `jax.vmap`, it follows a rough model of what the compiler fuses.
    """
    check.flag("measure", measure)
    traced, values, leaves = _trace(blocks, params, x, has_aux)
    return measured(traced, values, leaves) if measure else estimates(traced)


def _trace(
    blocks: Sequence[Callable[[Any, Any], Any]], params: Sequence[Any], x: Any, has_aux: bool
) -> tuple[list[Block], list[Arrays], Arrays]:
    """The blocks, each with the values of its `p`, and the leaves of the input."""
    for name, value, wanted in (("blocks", blocks, "functions"), ("params", params, "pytrees")):
        if isinstance(value, str | jax.Array) or not isinstance(value, Iterable):
            raise check.fail(TypeError, name, f"a sequence of {wanted}, one for each block", value)
    blocks, params = list(blocks), list(params)
    if not blocks:
        raise ValueError("blocks must have at least one function, got none")
    for i, f in enumerate(blocks):
        check.function(f"blocks[{i}]", f)
    check.flag("has_aux", has_aux)
    if len(blocks) != len(params):
        raise ValueError(f"params must have one entry per block, got {len(params)} for {len(blocks)} blocks")
    known: dict[Any, Block] = {}
    traced, values = [], []
    x = check.arrays("x", x)
    state = jax.tree.map(jax.typeof, x)
    for i, (f, p) in enumerate(zip(blocks, params, strict=True)):
        p = check.arrays(f"params[{i}]", p)
        p_leaves, p_tree = jax.tree.flatten(p)
        x_types, x_tree = jax.tree.flatten(state)
        key = (f, p_tree, tuple(map(jax.typeof, p_leaves)), x_tree, tuple(x_types))
        if key not in known:
            with call_errors(f"blocks[{i}]", f, {f"params[{i}]": p, "an input": state}):
                known[key] = Block(f, p, state, has_aux)
        block = known[key]
        traced.append(block)
        values.append([*block.consts, *p_leaves])
        state = jax.tree.unflatten(block.y_tree, block.y)
    return traced, values, jax.tree.leaves(x)
