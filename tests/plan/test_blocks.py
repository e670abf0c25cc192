"""Plans that run the turns of a loop again in blocks, from states that are kept (Gruslys et al. 2016)."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memjax
from memjax._plan.result import Stretch
from memjax._plan.schedule.choose import Costs, Steps
from memjax._plan.solve.loops import _schedules
from tests.remat.scan.scan_cases import arguments, close, loss, lstm, lstm_shapes

LENGTH = 37
WAYS = [  # block, tail, levels, slots
    (4, 1, (9,), 0),
    (1, 0, (37,), 0),
    (3, 1, (3, 4), 0),
    (1, 5, (4, 2, 4), 0),
    (5, 2, (), 3),
    (1, 1, (), 6),
]


@functools.cache
def plan_in_blocks(reverse, budget=6500):
    args = arguments(LENGTH)
    f = functools.partial(loss, functools.partial(lax.scan, reverse=reverse))
    return memjax.plan(f, *args, budget=budget, argnums=(0, 1, 2))


def with_blocks(plan, **changes):
    """The plan with other blocks, as JSON has it."""
    data = json.loads(plan.to_json())
    [loop] = [stretch for stretch in data["stretches"] if stretch[4] is not None]
    loop[Stretch._fields.index("in_blocks")] = [changes[name] for name in ("block", "tail", "levels", "slots")] + [0]
    return memjax.Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(("way", "reverse"), [*((way, False) for way in WAYS), (WAYS[2], True), (WAYS[4], True)])
@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_the_loop(way, reverse):
    """Nests and schedules, with and without a tail; a carry with integers, outputs, closed-over values."""
    args = arguments(LENGTH)
    f = functools.partial(loss, functools.partial(lax.scan, reverse=reverse))
    plan = with_blocks(plan_in_blocks(reverse), **dict(zip(("block", "tail", "levels", "slots"), way, strict=True)))
    wanted = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*args)
    found = jax.jit(jax.value_and_grad(memjax.planned(f, plan=plan), (0, 1, 2)))(*args)
    close(found, wanted)


def test_a_number_that_all_turns_read():
    """JAX hands it to the loop as a literal."""

    def f(w, xs):
        scale = jnp.float32(1.5)
        return (lax.scan(lambda h, x: (jnp.tanh(h @ w * scale + x), None), jnp.zeros((4, 8)), xs)[0] ** 2).sum()

    args = jnp.eye(8), jnp.linspace(-1, 1, 40 * 32).reshape(40, 4, 8)
    plan = with_blocks(memjax.plan(f, *args, budget="16KiB"), block=10, tail=10, levels=[3], slots=0)
    close(jax.jit(jax.grad(memjax.planned(f, plan=plan)))(*args), jax.jit(jax.grad(f))(*args), 1e-6)


def test_an_lstm_in_a_fiftieth_of_its_memory():
    """Budgets that no plan without blocks keeps: the state of every step alone is more. Gradients are the same bits."""
    length, batch, width = 200, 8, 32
    rng = np.random.default_rng(0)
    params, carry, xs = jax.tree.map(
        lambda aval: jax.device_put(rng.normal(size=aval.shape) / 6), lstm_shapes(width, batch, length)
    )

    def f(params, xs):
        (h, s), _ = lax.scan(functools.partial(lstm, params), carry, xs)
        return (h * s).sum()

    options = memjax.remat_compiler_options("cpu")
    compiled = lambda f: jax.jit(jax.value_and_grad(f)).lower(params, xs).compile(options)
    plain = compiled(f)
    nbytes = plain.memory_analysis().temp_size_in_bytes
    plan = memjax.plan(f, params, xs, budget=nbytes // 40)
    assert plan.compiled_nbytes <= nbytes // 40 < length * 2 * batch * width * 4
    assert plan.seconds < 2 * plan.plain_seconds
    planned = compiled(memjax.planned(f, plan=plan))
    assert planned.memory_analysis().temp_size_in_bytes <= nbytes // 40
    close(planned(params, xs), plain(params, xs), 1e-6)


@pytest.mark.parametrize(
    "changes",
    [{"block": 0}, {"block": 5}, {"tail": 40}, {"levels": [4, -1]}, {"slots": 3, "levels": [4]}, {"levels": []}],
)
@pytest.mark.usefixtures("x64")
def test_damaged_blocks_are_refused(changes):
    args = arguments(LENGTH)
    f = functools.partial(loss, lax.scan)
    plan = with_blocks(plan_in_blocks(False), **{"block": 4, "tail": 1, "levels": [9], "slots": 0} | changes)
    with pytest.raises(ValueError, match="plan must be what"):
        jax.grad(memjax.planned(f, plan=plan), (0, 1, 2))(*args)


def test_a_block_of_one_turn_stacks_nothing():
    """Beside the runs that its schedule says it makes what its backward pass reads, whatever a turn would keep."""
    forward, again, of_one, length = 1.0, 1.5, 0.25, 200
    row = jax.core.ShapedArray((64,), jnp.float32)
    found = _schedules(Steps(length, [row], [row]), Costs(forward, forward + of_one, again - of_one, 1e-6, 2e-6))
    tables = [(plan, seconds) for plan, seconds in found if plan.schedule is not None]
    assert 1 in {plan.block for plan, _ in tables}
    for plan, seconds in tables:
        more = again if plan.block > 1 else of_one
        assert seconds == pytest.approx(length * (plan.forward_runs - 1 + more), rel=0.02)


def test_schedules_leave_no_large_gap():
    """A budget between two of them is not left with a much slower one."""
    row = jax.core.ShapedArray((64,), jnp.float32)
    found = _schedules(Steps(1000, [row], [row] * 4), Costs(1.0, 1.0, 0.5, 1e-6, 2e-6))
    inner = lambda plan: max(plan.tail * 4, plan.block * 4 + sum(plan.levels[1:]) + 1)
    points = sorted((256 * (plan.rows + inner(plan)), seconds) for plan, seconds in found)
    for (few, slow), (more, fast) in itertools.pairwise(points):
        assert more <= max(1.1 * few, few + 256) or slow - fast < 0.15 * 1000
