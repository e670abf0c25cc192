"""Loops that end early, as libraries write loops of unknown length: scans inside of scans, each turn a `cond` round it."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memjax
from memjax._core.program.jaxpr import calls_in_place
from memjax._plan.early.loop import _up_to_next
from memjax._plan.early.options import _advances, is_plan
from memjax._plan.early.turns import in_one
from memjax._plan.schedule.execute import LoopPlan

pytestmark = pytest.mark.usefixtures("x64")
BASE, ROWS, WIDTH = 4, 64, 16
STATE = 8 * ROWS * WIDTH  # bytes


def _while(running, body, state, levels, *, base=BASE):
    """A loop of at most `base**levels` turns."""
    if not levels:
        return body(state)
    inside = functools.partial(_while, running, body, levels=levels - 1, base=base)
    turn = lambda state, _: (lax.cond(running(state), inside, lambda state: state, state), None)
    return lax.scan(jax.checkpoint(turn) if levels > 1 else turn, state, None, length=base)[0]


def _step(w, y):
    return y + 0.1 * jnp.tanh(jnp.tanh(y @ w) @ w.T)


def _loss(w, y, count, *, levels=3):
    """The state is written to a stack that no turn reads, and the loop ends by what the state is, too."""

    def body(state):
        i, y, stack = state
        y = _step(w, y)
        return i + 1, y, stack.at[i].set(y[0])

    running = lambda state: (state[0] < count) & (jnp.sum(state[1] ** 2) < 1e9)
    state = jnp.int32(0), y, jnp.zeros((BASE**levels, WIDTH))
    _, y, stack = _while(running, body, state, levels)
    return jnp.sum(y**2) + jnp.sum(stack**2)


def _of_stages(w, y, count):
    """A turn has a loop of its own, which reads what its turns have written, and a constant."""

    def body(state):
        i, y = state
        none = jnp.int32(0), y, jnp.zeros((3, *y.shape))

        def stage(state):
            j, z, slopes = state
            slope = jnp.tanh(z @ w)
            return j + 1, y + 0.1 * jnp.sum(slopes, 0) + 0.05 * slope, slopes.at[j].set(slope)

        _, z, _ = _while(lambda state: state[0] < 3, stage, none, 1)
        return i + 1, z

    return jnp.sum(_while(lambda state: state[0] < count, body, (jnp.int32(0), y), 2)[1] ** 2)


def _arguments():
    rng = np.random.default_rng(0)
    return jax.device_put((rng.normal(size=(WIDTH, WIDTH)) / 4, rng.normal(size=(ROWS, WIDTH))))


def _plain(loss):
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def _by(loss, plan):
    return jax.jit(jax.value_and_grad(memjax.planned(loss, plan=plan), (0, 1)))


def _blocks(plan):
    [found] = [one.in_blocks for one in plan.stretches if one.in_blocks is not None]
    return found


@functools.cache
def _plan(loss, budget):
    return memjax.plan(loss, *_arguments(), jnp.int32(0), budget=budget, argnums=(0, 1))


def _scans(closed):
    return [eqn for eqn in calls_in_place(closed, differentiable=True).eqns if eqn.primitive.name == "scan"]


def test_scans_in_scans_are_one():
    closed = jax.make_jaxpr(_loss)(*_arguments(), jnp.int32(5))
    one = in_one(closed)
    assert [eqn.params["length"] for eqn in _scans(one)] == [BASE**3]
    found = jax.core.eval_jaxpr(one.jaxpr, one.consts, *_arguments(), jnp.int32(5))
    chex.assert_trees_all_close(found, [_loss(*_arguments(), 5)], rtol=1e-12)


def test_loops_that_end_for_other_reasons_stay_apart():
    def loss(y):
        inner = lambda y: _while(lambda y: jnp.sum(y) < 50, lambda y: y + 1, y, 1)
        turn = lambda y, _: (lax.cond(jnp.sum(y) < 90, inner, lambda y: y, y), None)
        return lax.scan(turn, y, None, length=BASE)[0]

    assert [eqn.params["length"] for eqn in _scans(in_one(jax.make_jaxpr(loss)(jnp.zeros(3))))] == [BASE]


@pytest.mark.parametrize("budget", ["min", 13 * STATE, 30 * STATE])
def test_gradients_for_any_number_of_turns(budget):
    plan = _plan(_loss, budget)
    assert _blocks(plan).levels
    planned, plain = _by(_loss, plan), _plain(_loss)
    for count in (0, 1, 2, 7, 8, 9, 16, 33, BASE**3, 1000):
        expected = plain(*_arguments(), jnp.int32(count))
        chex.assert_trees_all_close(planned(*_arguments(), jnp.int32(count)), expected, rtol=1e-10, atol=1e-12)


def test_turns_that_never_run_leave_no_trace():
    """A turn after the end would divide by zero."""

    def loss(w, y, count):
        body = lambda state: (state[0] + 1, state[1] @ w / (count - state[0]).astype(w.dtype))
        return jnp.sum(_while(lambda state: state[0] < count, body, (jnp.int32(0), y), 2)[1] ** 2)

    planned, plain = _by(loss, _plan(loss, "min")), _plain(loss)
    expected = plain(*_arguments(), jnp.int32(3))
    chex.assert_tree_all_finite(expected)
    chex.assert_trees_all_close(planned(*_arguments(), jnp.int32(3)), expected, rtol=1e-10)


def test_bytes():
    """States of all turns are 64. The stack, of half a state, is in none of those that are kept."""
    plan = _plan(_loss, "min")
    plain = _plain(_loss).lower(*_arguments(), jnp.int32(0)).compile().memory_analysis().temp_size_in_bytes
    assert plan.compiled_nbytes <= min(11 * STATE, 0.7 * plain)
    assert _blocks(plan).state_nbytes < 1.1 * STATE


def test_loops_in_the_turns():
    plan = _plan(_of_stages, "min")
    planned, plain = _by(_of_stages, plan), _plain(_of_stages)
    for count in (0, 3, BASE**2):
        expected = plain(*_arguments(), jnp.int32(count))
        chex.assert_trees_all_close(planned(*_arguments(), jnp.int32(count)), expected, rtol=1e-10, atol=1e-12)
    assert plan.compiled_nbytes <= 26 * STATE


def test_plans_from_outside():
    plan = _plan(_loss, "min")
    again = memjax.Plan.from_json(plan.to_json())
    chex.assert_trees_all_equal(
        _by(_loss, again)(*_arguments(), jnp.int32(9)), _by(_loss, plan)(*_arguments(), jnp.int32(9))
    )
    few = tuple(
        one if one.in_blocks is None else one._replace(in_blocks=one.in_blocks._replace(levels=(3, 2)))
        for one in plan.stretches
    )
    with pytest.raises(ValueError, match=r"levels \(3, 2\)"):
        _by(_loss, dataclasses.replace(plan, stretches=few))(*_arguments(), jnp.int32(9))


def test_plans_have_rows_for_all_turns():
    of = lambda length, block, *levels: is_plan(LoopPlan(length, block, 0, levels=levels))
    assert of(100, 1, 100)
    assert of(100, 4, 8, 4)
    assert not of(100, 4, 7, 5)  # the distance of the states doubles: their number must be even
    assert not of(100, 4, 8, 4, 4)
    assert is_plan(LoopPlan(100, 1, 100))
    assert not is_plan(LoopPlan(100, 1, 50))


def test_as_few_turns_run_again_as_can_be():
    """From one state: by trying all ways to set down the next, for the model of time, and for where the loop sets it down."""

    @functools.cache
    def fewest(blocks, states):
        if blocks == 1 or states == 1:
            return blocks * (blocks - 1) // 2
        every = range(1, blocks)
        return min(first + fewest(blocks - first, states - 1) + fewest(first, states) for first in every)

    plan = LoopPlan(40, 1, 0, levels=(2, 5))
    next_of = jax.jit(lambda left, free: _up_to_next(left, free, plan))
    for states in range(1, 6):
        blocks = np.arange(1.0, 41)
        assert _advances(blocks, np.full(40, states)).tolist() == [fewest(int(one), states) for one in blocks]
        for left in range(2, 41 if states > 1 else 2):
            first = int(next_of(jnp.int32(left), jnp.int32(states - 1)))
            assert first + fewest(left - first, states - 1) + fewest(first, states) == fewest(left, states)


def test_loops_that_are_not_differentiated():
    """Beside one that is, and inside of its turns: they run to their ends, and no turn more."""

    def most(y, count):
        body = lambda state: (state[0] + 1, jnp.maximum(jnp.sin(2 * state[1]), state[1] / 2))
        return _while(lambda state: state[0] < count, body, (jnp.int32(0), lax.stop_gradient(y)), 2)[1]

    def loss(w, y, count):
        body = lambda state: (state[0] + 1, _step(w, state[1]) + jnp.max(most(state[1], count)))
        _, found = _while(lambda state: state[0] < count, body, (jnp.int32(0), y), 2)
        return jnp.sum(found**2) * jnp.max(most(y, count))

    plan = _plan(loss, "min")
    expected = _plain(loss)(*_arguments(), jnp.int32(3))
    chex.assert_trees_all_close(_by(loss, plan)(*_arguments(), jnp.int32(3)), expected, rtol=1e-10)
    text = str(jax.make_jaxpr(_by(loss, plan))(*_arguments(), jnp.int32(3)))
    assert "scan" not in text
