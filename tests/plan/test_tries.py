"""Which plans are tried where the compiler takes more than was predicted, for compilers that are given."""

from itertools import pairwise

import jax
import jax.numpy as jnp

import memjax
from memjax._plan.budget import known
from memjax._plan.budget.decide import _decide
from memjax._plan.budget.known import Known, key_of
from memjax._plan.budget.plans import Plans
from memjax._plan.memory.layout import Layout
from memjax._plan.run import KeepAll
from memjax._plan.solve.chain import peak_of
from memjax._plan.solve.leaner import leaner
from tests.plan.test_bytes import LAYERS, ROWS, WIDTH, array, chain


def uncompiled(chain):
    """What is known of a program that is never compiled."""
    found = Known.__new__(Known)
    found.chain, found.layout, found.digest, found.step_bytes = chain, Layout(()), "", lambda *_: None
    found._measure, found._predicted, found.is_split = None, {}, False
    return found


def test_plans_of_one_kind_differ_in_the_turns_of_the_parts_of_a_loop_alone():
    """A part of one turn is no loop when it is compiled, so it is of another kind."""

    def loss(ws, x):
        turn = lambda x, w: (x + jnp.tanh(jnp.sin(x @ w["up"])) @ w["down"], None)
        return jnp.sum(jax.lax.scan(turn, x, ws)[0] ** 2)

    wide = 32 * WIDTH  # so that keeping a product's result pays
    ws = {"up": array(8, wide, 8 * wide), "down": array(8, 8 * wide, wide)}
    known = uncompiled(chain(loss, ws, array(8 * ROWS, wide)))
    plans = Plans(known)
    turns_of = {}
    for number in range(1, len(plans.predicted)):
        [loop] = [one.option for one in plans.choices(number) if one.option.parts]
        if loop.in_blocks is not None:
            continue
        parts = loop.parts
        turns_of.setdefault(plans.kind(number), []).append(tuple(turns for turns, _ in parts))
    assert max(map(len, turns_of.values())) > 1
    for turns in turns_of.values():
        assert len(set(turns)) == len(turns)
        assert len({tuple(count == 1 for count in one) for one in turns}) == 1
    ways = {known.stretches(plans.choices(number)) for number in range(len(plans.predicted))}
    keys = {key_of(way, in_steps) for way in ways for in_steps in (False, True)}
    assert len(keys) == 2 * len(ways)  # each of these is compiled by itself


def test_steps_are_tried_where_a_faster_plan_is_missed_and_not_otherwise(monkeypatch):
    """Every plan takes a tenth more than predicted: too much for the middle one, while the fastest one fits a large budget."""

    def loss(ws, x):
        for up, down in ws:
            x = x + jnp.tanh(jnp.sin(x @ up)) @ down
        return jnp.sum(x**2)

    ws = [(array(WIDTH, 8 * WIDTH), array(8 * WIDTH, WIDTH))] * LAYERS
    tried = []

    def compiled(plans, number):
        tried.append(plans.in_steps)
        return plans.predicted[number] * 11 // 10

    monkeypatch.setattr(Plans, "compiled", compiled)
    found = chain(loss, ws, array(ROWS, WIDTH))
    program = uncompiled(found)
    middle, most = (found.frontier[at][0] for at in (len(found.frontier) // 2, -1))
    _decide(program, middle)
    assert any(tried)  # one of the plans that were compiled runs in steps
    tried.clear()
    assert _decide(program, 2 * most).compiled_nbytes is None
    assert tried
    assert not any(tried)


def narrow_loss(ws, x):
    """Beside the wide products narrow ones, which cost little to run again."""
    for up, down, narrow in ws:
        x = x + jnp.tanh(jnp.sin(x @ up)) @ down + jnp.tanh(jnp.sin(x @ narrow)).sum(-1, keepdims=True)
    return jnp.sum(x**2)


def narrow_arguments():
    rows, width = 128 * ROWS, 16 * WIDTH
    return [(array(width, 8 * width), array(8 * width, width), array(width, WIDTH))] * LAYERS, array(rows, width)


def test_a_leaner_way_keeps_less_in_little_more_time_and_no_more_bytes():
    found = chain(narrow_loss, *narrow_arguments())
    seconds = lambda choices: sum(one.option.seconds for one in choices)
    kept = lambda choices: sum(one.option.kept_nbytes for one in choices)
    saved = []
    for nbytes, _ in found.frontier:
        before = found.choices(nbytes)
        allowed = 1e-3 * (found.base_seconds + seconds(before))
        fewer = leaner(found, before, allowed)
        assert [(one.start, one.stop) for one in fewer] == [(one.start, one.stop) for one in before]
        assert seconds(fewer) <= seconds(before) + allowed + 1e-12
        assert peak_of(fewer) <= peak_of(before)
        saved.append(kept(before) - kept(fewer))
        assert (saved[-1] > 0) == (fewer != before)
        assert seconds(leaner(found, before, 0.0)) <= seconds(before)
    assert max(saved) > 0


def test_a_plan_that_takes_a_little_too_much_is_made_leaner_if_it_is_much_faster(monkeypatch):
    """The compiler takes a byte more than was predicted, and than the budget, for one plan, and less for a leaner one."""
    found = chain(narrow_loss, *narrow_arguments())
    program = uncompiled(found)
    plans = Plans(program)
    lost = [before / after - 1 for before, after in pairwise(plans.seconds)]
    [over, *_] = [number + 1 for number, part in enumerate(lost) if number and part > 0.02]
    assert plans.predicted[over] < 1.5 * plans.predicted[over - 1]
    budget = plans.predicted[over]

    def compiled(plans, number):
        return plans.predicted[number] - (number >= plans.count) + (number == over)

    monkeypatch.setattr(Plans, "compiled", compiled)
    decided = _decide(program, budget)
    assert decided.tries[-1].number >= plans.count
    assert plans.seconds[over] <= decided.seconds <= 1.001 * plans.seconds[over]
    assert decided.plain_seconds == plans.seconds[-1]
    assert decided.nbytes <= budget


def test_a_way_between_keeps_less_where_the_compiler_takes_most(monkeypatch):
    """Much is made for the first layer: by the prediction the others keep everything for nothing. The compiler counts that."""

    def loss(ws, x):
        up, down, *others = ws
        x = jnp.tanh(jnp.sin(x @ up)) @ down
        for w in others:
            x = jnp.tanh(jnp.sin(x @ w))
        return jnp.sum(x**2)

    size = 64 * WIDTH
    ws = [array(size, 8 * size), array(8 * size, size), *[array(size, size)] * 10]
    program = uncompiled(chain(loss, ws, array(64 * ROWS, size)))
    plans = Plans(program)
    kept = lambda plans, number: sum(one.option.kept_nbytes for one in plans.choices(number))
    monkeypatch.setattr(Plans, "compiled", lambda plans, number: plans.predicted[number] + kept(plans, number) // 2)
    assert plans.predicted[0] == plans.predicted[1]
    assert plans.seconds[0] > 1.05 * plans.seconds[1]
    for share in (0.4, 0.7):
        decided = _decide(program, plans.predicted[0] + int(share * kept(plans, 1) / 2))
        assert decided.nbytes <= decided.budget
        assert plans.seconds[1] < decided.seconds < plans.seconds[0] / 1.02
        assert len(decided.tries) <= 6


def test_keeping_everything_is_not_compiled_where_what_is_kept_takes_too_much(monkeypatch):
    """A plan that runs next to nothing again is as fast, so that all would be kept if it fitted."""

    def loss(ws, x):
        for w in ws:
            y = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True))
            x = x + jax.nn.silu(y @ w) * y
        return jnp.sum(x**2)

    args = [array(4 * WIDTH, 4 * WIDTH)] * 8, array(ROWS, 4 * WIDTH)
    gradient = jax.jit(jax.value_and_grad(loss), compiler_options=memjax.remat_compiler_options("cpu"))
    plain = gradient.lower(*args).compile().memory_analysis().temp_size_in_bytes
    compiled, measure = [], known.compiled_bytes
    monkeypatch.setattr(known, "compiled_bytes", lambda run, *rest: compiled.append(run) or measure(run, *rest))
    for share, is_compiled in ((0.7, False), (1.0, True)):
        known.forget()
        compiled.clear()
        memjax.plan(loss, *args, budget=int(share * plain))
        assert any(isinstance(run, KeepAll) for run in compiled) == is_compiled
