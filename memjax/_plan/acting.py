"""The two passes of a program under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memjax._core.meshes import device_of
from memjax._core.program import costs
from memjax._plan.budget.checked import check_stretches, check_tiles
from memjax._plan.budget.digest import digest
from memjax._plan.budget.stretches import choices
from memjax._plan.codes import rounds
from memjax._plan.derivative import Passes
from memjax._plan.memory.layout import Layout, warn_of_guess
from memjax._plan.result import Plan
from memjax._plan.run import KeepAll, Run
from memjax._plan.solve.chain import Chain
from memjax._plan.tile.choose import Program, choose

_OF_DEVICES = {"cuda": "gpu", "rocm": "gpu"}  # by what JAX compiles for, what it calls the platform of a device


class Asked(NamedTuple):
    """What a user asks of `planned`.

    Attributes:
      budget, plan: exactly one of them.
      allow: what a plan that is made may do.
      known: the plans made so far, by digest of the program and shardings; more are added.
    """

    budget: int | str | None
    plan: Plan | None
    allow: Sequence[str]
    known: dict[Any, Plan]


def acting(
    asked: Asked,
    closed: Any,
    axes: dict[str, int],
    types: Sequence[Any],
    wrt: Sequence[bool],
    outs: Sequence[bool],
    layout: Layout,
) -> Run | KeepAll:
    """The two passes by the plan that was asked for, or by one that is made.

    Args:
      asked: what the user asks.
      closed: the program.
      axes: sizes of the named axes that its collectives run over.
      types, layout: of its constants and inputs together.
      wrt, outs: which of them, and which outputs, are differentiated.
    """
    plan = asked.plan
    platform = device_of(layout.shardings).platform if plan is None else _OF_DEVICES.get(plan.platform, plan.platform)
    program = Program(closed, types, wrt, outs, axes, platform)
    if plan is None:
        key = digest(program.derivative()), tuple(map(str, layout.shardings))
        if key not in asked.known:
            assert asked.budget is not None
            asked.known[key] = choose(program, layout, asked.budget, asked.allow)
            fix = "plan ahead: plan=memjax.plan(f, *args, budget=...) of sharded arrays, then memjax.planned(f, plan=plan)"
            warn_of_guess(layout, "planned", fix)
        plan = asked.known[key]
    elif plan.tiled:
        check_tiles(program.every, plan)
    return by_plan(program.derivative(plan.tiled), plan, layout)


def by_plan(derivative: Passes, plan: Plan, layout: Layout, wrt: Sequence[bool] | None = None) -> Run | KeepAll:
    """The two passes of the derivative that the plan was made for.

    Args:
      derivative: that one.
      plan: the plan.
      layout: of the inputs.
      wrt: which inputs are differentiated, if these are fewer than those of the derivative.

    Raises:
      ValueError: it was made for another one, or says what no plan of it does.
    """
    chain = chain_of(derivative, plan, layout)
    planned = chain.derivative if plan.stretches else derivative
    if wrt is not None and tuple(wrt) != derivative.wrt:
        planned = planned.of_fewer(wrt)
    if not plan.stretches:
        return KeepAll(planned)
    platform = plan.platform if plan.in_steps else None
    return Run(chain, choices(chain, plan.stretches), platform, planned, gathers_again=plan.gathers_again)


def chain_of(derivative: Passes, plan: Plan, layout: Layout) -> Chain:
    """The chain, not solved, of the derivative that the plan was made for; raises as `by_plan`."""
    if plan.program != (found := digest(derivative)):
        raise ValueError(
            "plan must be of the function, the types and the differentiated arguments that it is used for, got one of another "
            f"program ({plan.program} instead of {found}): call memjax.plan with what you pass here, and with the same argnums"
        )
    bits = {kept.bits for stretch in plan.stretches for kept in stretch.kept} - {None}
    rates, compress = costs.device(device_of(layout.shardings)), any(map(rounds, bits))
    chain = Chain(derivative, rates, compress=compress, pack=bool(bits), solved=False)
    check_stretches(chain, plan)
    return chain
