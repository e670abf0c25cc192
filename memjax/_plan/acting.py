"""The two passes of a program under a plan."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from memjax._core.program import costs
from memjax._plan.budget.checked import check_stretches, check_tiles
from memjax._plan.budget.decide import decide
from memjax._plan.budget.digest import digest
from memjax._plan.budget.pieces import pieces
from memjax._plan.compiled import device_of
from memjax._plan.derivative import Passes
from memjax._plan.free import free_bytes
from memjax._plan.layout import Layout, warn_of_guess
from memjax._plan.result import Plan
from memjax._plan.run import KeepAll, Piece, Run, run
from memjax._plan.solve.chain import Chain
from memjax._plan.tile.choose import Program, choose

_OF_DEVICES = {"cuda": "gpu", "rocm": "gpu"}  # by what JAX compiles for, what it calls the platform of a device


def acting(
    closed: Any,
    axes: dict[str, int],
    types: Sequence[Any],
    wrt: Sequence[bool],
    outs: Sequence[bool],
    layout: Layout,
    *,
    budget: int | str | None,
    plan: Plan | None,
    known: dict[Any, Plan],
    allow: Sequence[str],
) -> Run | KeepAll:
    """The two passes by `plan`, or by one that is made for `budget`.

    Args:
      closed: the program.
      axes: sizes of the named axes that its collectives run over.
      types, layout: of its constants and inputs together.
      wrt, outs: which of them, and which outputs, are differentiated.
      budget, plan: exactly one of them.
      known: the plans made so far, by digest of the program and shardings; more are added.
      allow: what a plan that is made may do.
    """
    platform = device_of(layout.shardings).platform if plan is None else _OF_DEVICES.get(plan.platform, plan.platform)
    program = Program(closed, types, wrt, outs, axes, platform)
    if plan is None:
        key = digest(program.derivative()), tuple(map(str, layout.shardings))
        if key not in known:
            room = free_bytes(types, program.derivative(), layout) if budget == "device" else budget
            assert room is not None
            more: dict[str, Any] = {"compress": "compress" in allow, "offload": "offload" in allow}
            solve = functools.partial(decide, types=types, layout=layout, budget=room, **more)
            known[key] = choose(program, solve, allow, room)
            fix = "plan ahead: plan=memjax.plan(f, *args, budget=...) of sharded arrays, then memjax.planned(f, plan=plan)"
            warn_of_guess(layout, "planned", fix)
        plan = known[key]
    elif plan.tiled:
        check_tiles(program.tiling.found, plan)
    derivative = program.derivative(plan.tiled)
    return by_plan(derivative, plan, layout)


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
    if plan.program != (found := digest(derivative)):
        raise ValueError(
            "plan must be of the function, the types and the differentiated arguments that it is used for, got one of another "
            f"program ({plan.program} instead of {found}): call memjax.plan with what you pass here, and with the same argnums"
        )
    in_codes = any(kept.bits is not None for stretch in plan.stretches for kept in stretch.kept)
    chain = Chain(derivative, costs.device(device_of(layout.shardings)), compress=in_codes, solved=False)
    check_stretches(chain, plan)
    parts = pieces(chain, plan.stretches)
    if wrt is not None and tuple(wrt) != derivative.wrt:
        derivative = derivative.of_fewer(wrt)
        there = {id(eqn) for eqn in derivative.backward.eqns}
        parts = [_still_read(piece, there) for piece in parts]
    return run(derivative, parts, plan.platform if plan.in_steps else None)


def _still_read(piece: Piece, backward: set[int]) -> Piece:
    """The piece with those equations of the backward pass alone that are there still, by their ids."""
    piece = piece._replace(backward=[eqn for eqn in piece.backward if id(eqn) in backward])
    if piece.loop is not None and id(piece.loop.backward) not in backward:
        return piece._replace(loop=None, parts=())
    return piece
