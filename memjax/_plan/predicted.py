"""What is alive at the predicted peak of a plan: the arrays that its predicted bytes are the sum of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from memjax._core.meshes import device_of
from memjax._core.program import costs
from memjax._core.program.costs import array_bytes
from memjax._core.program.scopes import maker_of, place_of
from memjax._core.program.working import Moment, fullest_moment, hoisted_bytes
from memjax._explain.parts import Alive
from memjax._plan.acting import chain_of
from memjax._plan.budget.stretches import choices
from memjax._plan.codes import codes_in
from memjax._plan.derivative import LoopPair, Passes
from memjax._plan.early.options import states_of
from memjax._plan.memory.layout import Layout
from memjax._plan.memory.on_device import on_device
from memjax._plan.result import Plan
from memjax._plan.solve.chain import Chain, Choice
from memjax._plan.solve.loops import carried, in_results, remade, turn_of, written
from memjax._plan.solve.order import as_compiled
from memjax._plan.solve.phases import available_anywhere
from memjax._plan.solve.segment import BackwardTurn, Option
from memjax._plan.solve.subsets import Subset

_HOISTED = "indices and zeros for the gradients of pools"


class _Held(NamedTuple):
    """Bytes that are alive. Fewer than none: those of them that lie in other memory.

    Attributes:
      of: a variable; the equation whose working memory it is; or a name.
      nbytes: of all of them together.
      stacked: how many lie in one array; None: it is the variable.
      in_code: it is the code of the variable.
    """

    of: Any
    nbytes: int
    stacked: int | None = None
    in_code: bool = False


def predicted_at_peak(derivative: Passes, plan: Plan | None, layout: Layout) -> list[Alive]:
    """What is alive then, with bytes of a device.

    Args:
      derivative: of the program.
      plan: of it; None, or one without stretches: everything is kept, see `as_written`.
      layout: of its inputs.
    """
    if plan is not None and plan.stretches:
        chain = chain_of(derivative, plan, layout)
        if layout.has_parts:
            chain = Chain(on_device(chain.derivative, layout), chain.rates, whole=chain, solved=False)
            layout = layout.of_device
        return alive_by(chain, choices(chain, plan.stretches), layout)
    if layout.has_parts:
        derivative, layout = on_device(derivative, layout), layout.of_device
    moment, hoisted = as_written(derivative, costs.device(device_of(layout.shardings)).platform)
    held = [*_in(moment, Subset([], [])), _Held(_HOISTED, hoisted)]
    return _named(held, dict(_origins(derivative, ())), layout)


def as_written(passes: Passes, platform: str) -> tuple[Moment, int]:
    """The moment with the most bytes alive if everything is kept, and bytes of what compilers make at the start for the backward
    pass: JAX keeps what the backward equations read of the forward ones."""
    eqns = as_compiled([*passes.forward.eqns, *passes.backward.eqns], platform)
    results = [*passes.outputs, *passes.backward.outvars]
    moment = fullest_moment(eqns, passes.forward.invars, [], [], results, platform)
    return moment, hoisted_bytes(passes.backward.eqns, platform)


def alive_by(chain: Chain, way: Iterable[Choice], layout: Layout) -> list[Alive]:
    """The same of a way through a chain."""
    before: list[_Held] = []
    most: list[_Held] = []
    for choice in way:
        kept, there = (_of_loop if choice.option.parts else _of_stretch)(chain, choice)
        most = max(most, [*before, *there], key=_nbytes)
        before += kept
    return _named(most, dict(_origins(chain.derivative, chain.loops.values())), layout)


def _nbytes(held: Iterable[_Held]) -> int:
    return sum(one.nbytes for one in held)


def _of_stretch(chain: Chain, choice: Choice) -> tuple[list[_Held], list[_Held]]:
    """What is kept of a stretch, and what is alive at its peak besides what is kept of those before."""
    turn = BackwardTurn(chain.between(choice.start, choice.stop), chain.rates, chain.free)
    subset = Subset([*choice.option.kept], codes_in(chain.codes, choice.option.coded))
    lent = _Held("kept in the memory of results that are not made yet", -turn.lent(subset))
    kept = [*map(_whole, turn.handed_on), *_kept(turn, subset), lent]
    return kept, [*_in(turn.peak(subset, turn.again(subset)), subset), lent]


def _of_loop(chain: Chain, choice: Choice) -> tuple[list[_Held], list[_Held]]:
    """The same of a loop: see `loop_options`, which has the sums."""
    pair, plan = chain.loops[choice.start], choice.option.in_blocks
    segment = chain.between(choice.start, choice.stop)
    free, codes = available_anywhere(pair.program, pair.free), chain.codes_of_loop(pair)
    turn = BackwardTurn(turn_of(pair, free), chain.rates, free, is_loop=True)
    crossing = [*map(_whole, segment.crossing)]
    moving = [*map(_whole, (*segment.entering, *written(pair, segment)))]
    if chain.rates.platform != "cpu":
        moving += [_Held("carried in the memory of a result", -array_bytes(var)) for var in in_results(pair, segment)]

    def inside(option: Option, turns: int) -> tuple[list[_Held], list[_Held]]:
        """What so many turns keep, and what is alive at the peak of one of them."""
        subset = Subset([*option.kept, *option.moved], codes_in(codes, option.coded))
        there = _in(turn.peak(subset, turn.again(subset)), subset)
        return _stacked(_kept(turn, subset._replace(kept=[*option.kept])), turns), there

    if plan is not None and pair.early is not None:
        [(_, option)] = choice.option.parts
        (tail, there), (block, _) = inside(option, plan.tail), inside(option, plan.block if plan.block > 1 else 0)
        state = [*map(_whole, states_of(pair))]
        kept = [*crossing, *_stacked(state, sum(plan.levels) + 1 if plan.levels else 0), *tail]
        rows = _stacked(state, 1 if plan.levels else 0)
        again = map(_whole, remade(pair, chain.free))
        return kept, [*kept, *rows, *block, *there, *again, *moving]
    if plan is not None:
        [(_, option)] = choice.option.parts
        carry = [_whole(var) for var in pair.program.invars[slice(*carried(pair.forward))]]
        states, levels = _stacked(carry, plan.rows), _stacked(carry, sum(plan.levels[1:]) + 1)
        (tail, there), (block, _) = inside(option, plan.tail), inside(option, plan.block)
        running = max(tail, [*block, *levels], key=_nbytes)
        again = map(_whole, remade(pair, chain.free))
        return [*crossing, *states, *tail], [*crossing, *states, *running, *there, *again, *moving]
    held: list[_Held] = []
    most: list[_Held] = []
    parts = choice.option.parts
    for turns, option in reversed(parts) if pair.forward.params["reverse"] else parts:
        stacks, there = inside(option, turns)
        most = max(most, [*held, *there, *(stacks if turns > 1 else ())], key=_nbytes)
        held += stacks
    return [*crossing, *held], [*crossing, *most, *moving]


def _whole(var: Any) -> _Held:
    return _Held(var, array_bytes(var))


def _kept(turn: BackwardTurn, subset: Subset) -> list[_Held]:
    codes = (_Held(code.of, code.nbytes, in_code=True) for code in subset.coded)
    hoisted = _Held(_HOISTED, turn.hoisted_nbytes)
    return [*map(_whole, subset.kept), *codes, hoisted]


def _stacked(held: Iterable[_Held], count: int) -> list[_Held]:
    return [one._replace(nbytes=count * one.nbytes, stacked=count) for one in held]


def _in(moment: Moment, subset: Subset) -> list[_Held]:
    """What is alive at a moment. What is written over an operand takes that one's bytes."""
    codes = {code.variable: _Held(code.of, code.nbytes, in_code=True) for code in subset.coded}
    found, over, made = [], moment.over, set(moment.made)
    for var, nbytes in moment.alive:
        one = codes.get(var, _Held(var, nbytes))
        less = min(over, one.nbytes) if var in made else 0
        over -= less
        found.append(one._replace(nbytes=one.nbytes - less))
    return [*found, _Held(moment.flow.eqns[moment.at], moment.inside)] if moment.inside else found


def _origins(derivative: Passes, loops: Iterable[LoopPair]) -> Iterator[tuple[Any, tuple[str, str]]]:
    """By variable what makes it, and where."""
    programs = [derivative.forward, derivative.backward]
    for pair in loops:
        programs += [pair.program, pair.pull]
        for body in (pair.program, pair.pull):
            yield from dict.fromkeys(body.invars, (f"read by a turn of {maker_of(pair.forward)}", "")).items()
    for program in programs:
        for var, eqn in program.flow.makers.items():
            yield var, (maker_of(eqn), place_of(eqn))


def _named(held: Iterable[_Held], origins: dict[Any, tuple[str, str]], layout: Layout) -> list[Alive]:
    """What is alive, with names, places and bytes of a device."""
    return [_as_alive(one, origins, layout.local(one.nbytes)) for one in held if one.nbytes]


def _as_alive(held: _Held, origins: dict[Any, tuple[str, str]], nbytes: int) -> Alive:
    if isinstance(held.of, str):
        return Alive(held.of, "", "", nbytes)
    if hasattr(held.of, "primitive"):
        return Alive(f"working memory of {maker_of(held.of)}", "", "", nbytes)
    (made, where), aval = origins.get(held.of, ("cotangent of a result", "")), held.of.aval
    if held.in_code:
        return Alive(f"code of {made}", where, "", nbytes)
    shape = aval.shape if held.stacked is None else (held.stacked, *aval.shape)
    return Alive(made, where, f"{aval.dtype}[{','.join(map(str, shape))}]", nbytes)
