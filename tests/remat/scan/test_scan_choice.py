"""Which plan `remat.scan` chooses for its budget or slots, and that it is the plan that runs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from memjax._plan.schedule import choose as choose_module
from memjax._plan.schedule.choose import exact, fastest
from memjax._plan.schedule.execute import LoopPlan
from memjax.remat import Costs, profile, scan, schedule
from memjax.remat._scan.step import StepBackward, trace_step
from memjax.remat._scan.ways import Ways
from tests.remat.scan.scan_cases import close, lstm_step, stored_bytes

pytestmark = pytest.mark.usefixtures("x64")


def test_choice():
    """Costs decide: where only steps cost, both kinds of states; where loops do, nests; a tail if the length asks."""
    step, _, backward = lstm_step(8, 4)
    steps_alone, dear_turns = Costs(1.0, 2.0, 0.01, 0.0, 0.0), Costs(1.0, 2.0, 0.0, 0.0, 9.0)

    def plan(length, carries, costs):
        return fastest(backward.steps(length), carries * step.carry_nbytes, costs)[0]

    assert plan(210, 30, steps_alone).schedule.strategy == "mixed"
    assert plan(210, 30, Costs(1.0, 2.0, 5.0, 0.0, 0.0)).schedule.strategy == "hidden"  # storing is dear
    assert plan(2000, 60, dear_turns).levels
    assert not plan(2000, 60, dear_turns).tail
    assert plan(1999, 60, dear_turns).tail
    assert plan(210, 800, dear_turns).tail == 210  # everything is kept
    for carries in range(6, 800, 41):
        stored = stored_bytes(plan(210, carries, Ways(backward, None).costs), step.carry_nbytes, backward.kept_nbytes)
        assert stored <= carries * step.carry_nbytes


def test_measured_costs_are_finite_and_can_be_planned_with():
    """How large they are depends on the machine; that they are of the step, forward and backward, does not."""
    weights = jnp.eye(4)

    def step(h, x):
        h = jnp.tanh(h @ weights + x)
        return h, h.sum()

    costs = profile(step, jnp.ones(4), jnp.ones((2, 4)))
    assert costs.forward > 0
    assert costs.backward > 0
    total = lambda run, **options: lambda h: run(step, h, jnp.ones((20, 4)), **options)[1].sum()
    close(jax.grad(total(scan, budget="3KiB", costs=costs))(jnp.ones(4)), jax.grad(total(lax.scan))(jnp.ones(4)), 1e-5)


def test_the_profile_of_a_step_that_does_nothing():
    costs = profile(lambda h, x: (h, None), jnp.ones(4), jnp.ones((20, 4)))
    assert costs.forward >= 0


def test_steps_that_cost_nothing(monkeypatch):
    """The search ends where no block is too large for the budget, and none is predicted to take any time."""
    calls = []
    division = choose_module._division

    def counted(size, block):
        calls.append(block)
        assert len(calls) < 100
        return division(size, block)

    monkeypatch.setattr(choose_module, "_division", counted)

    def total(h):
        carry, _ = scan(lambda carry, _: ((0.0, 0.0), ()), (h, 0.0), length=5, budget="1MiB")
        return sum(carry)

    assert jax.grad(total)(1.0) == 0


def test_default_strategy():
    """Hidden states or both kinds, whichever time, predicted from the schedule itself, is least."""
    _, _, backward = lstm_step(8, 4)

    def strategy(slots, length=210, **costs):
        plan = exact(backward.steps(length), slots, None, Costs(**costs))
        assert plan.rows <= slots
        return plan.schedule.strategy

    steps_alone = {"forward": 1.0, "backward": 2.0, "store": 0.0, "loop": 0.0, "turn": 0.0}
    for slots in (12, 40, 300):  # where only steps cost, the fewer of them
        hidden, mixed = (
            exact(backward.steps(210), slots, s, Costs(**steps_alone)).schedule for s in ("hidden", "mixed")
        )
        fewest = "hidden" if hidden.forward_steps <= mixed.forward_steps else "mixed"
        assert strategy(slots, **steps_alone) == fewest
    assert strategy(300, **steps_alone) == "mixed"
    assert strategy(300, **steps_alone | {"store": 9.0}) == "hidden"  # storing is dear
    # As timed on a GPU: with 10, 30 and 50 slots for 1,000 steps hidden states took 106, 81 and 71 ms, both kinds 158, 107
    # and 100.
    timed = {"forward": 8.7e-6, "backward": 1.3e-5, "store": 6e-6, "loop": 4e-6, "turn": 1.1e-5}
    assert [strategy(slots, 1000, **timed) for slots in (10, 30, 50)] == ["hidden"] * 3


@pytest.mark.parametrize("strategy", ["hidden", "internal", "mixed"])
@pytest.mark.parametrize("slots", [2, 11])
def test_executes_the_schedule(strategy, slots):
    """Forward steps, counted as they happen, and in memory that holds no more than the slots."""
    steps = []

    def cell(h, x):
        jax.debug.callback(lambda: steps.append(1))
        a = jnp.tanh(h * x)
        b = jnp.sort(a)  # one more value to keep
        return jnp.tanh(b * h), None

    xs = jnp.linspace(0.5, 1.5, 29)[:, None] * jnp.ones(4)

    def total(scan, h, xs, **options):
        return scan(cell, h, xs, **options)[0].sum()

    step, _ = trace_step(cell, jnp.ones(4), xs)
    plan = exact(StepBackward(step, [], [True]).steps(29), slots, strategy, Costs(1.0, 2.0, 0.0, 0.0, 0.0))
    assert plan.schedule == schedule(29, slots, strategy=strategy, internal_size=plan.schedule.internal_size)
    got = jax.jit(jax.grad(functools.partial(total, scan, slots=slots, strategy=strategy), (0, 1)))(jnp.ones(4), xs)
    jax.effects_barrier()
    assert len(steps) == plan.schedule.forward_steps
    assert plan.rows <= slots
    close(got, jax.grad(functools.partial(total, lax.scan), (0, 1))(jnp.ones(4), xs))
    if (strategy, slots) == ("mixed", 11):  # some residuals come from slots, some are made anew
        assert len(set(plan.moves.residuals)) > 2
        assert (plan.moves.turns == 0).any()
        assert (plan.moves.turns > 0).any()


def test_forward_runs_of_nests():
    """12 steps in 2 parts of 3 of 2 steps: once at first, all again to find the parts, and to backpropagate blocks."""
    nest = LoopPlan(12, 2, 0, levels=(2, 3))
    assert nest.forward_runs == 1 + (12 * 2 // 3 + 12) / 12
    assert LoopPlan(16, 4, 4, levels=(3,)).forward_runs == 1 + 12 / 16
    assert LoopPlan(16, 1, 16).forward_runs == 1


def test_a_step_by_itself_is_no_loop():
    """Where all states fit, what is left keeps the residuals of the last steps, and no other step waits for a loop."""
    _, _, backward = lstm_step(8, 4)
    steps = backward.steps(400)
    room = 401 * steps.carry_nbytes + 100 * (steps.kept_nbytes - steps.carry_nbytes)
    plan, seconds = fastest(steps, room, Costs(1.0, 2.0, 0.1, 50.0, 60.0))
    assert (plan.block, plan.tail, plan.levels) == (1, 100, (300,))
    assert seconds == pytest.approx(400 * 3.0 + 300 + 100 * 0.1)


def test_what_a_step_keeps_is_chosen_with_the_plan():
    """Where memory is dear states alone, from which a step runs again; else what products follow from."""
    step, _, backward = lstm_step(8, 4)
    ways = Ways(backward, None)
    few, many = (ways.fastest(210, carries * step.carry_nbytes) for carries in (8, 700))
    assert few.backward.kept_nbytes == step.carry_nbytes < many.backward.kept_nbytes
    assert few.plan.forward_runs <= fastest(backward.steps(210), 8 * step.carry_nbytes, ways.costs)[0].forward_runs
    measured = Costs(1.0, 2.0, 0.5, 0.1, 0.2)
    assert Ways(backward, measured).fastest(210, 8 * step.carry_nbytes).backward.kept_nbytes == step.carry_nbytes
