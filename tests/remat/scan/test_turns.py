"""Several steps in a turn of a loop: which are tried, and that they compute the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax import remat
from memjax._plan.schedule import unroll
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.schedule.unroll import ONE, Unroll, unrolls
from memjax.remat._scan import scan
from memjax.remat._scan.filling import filling, with_unroll
from memjax.remat._scan.ways import Way

FAST, IN_ORDER, LEAN = Unroll(5, 5), Unroll(5, 5, "residuals"), Unroll(5, 1, "all")
SMALL, LARGE = [jnp.zeros(256)], [jax.ShapeDtypeStruct((1 << 22,), jnp.float32)]


def loss(params, xs, *, how=jax.lax.scan, **options):
    def step(carry, x):
        h, c = carry
        h = jnp.tanh(h @ params + x)
        return (h, c + h * jnp.sin(c)), h[:, 0]

    start = (jnp.zeros(xs.shape[1:], xs.dtype),) * 2
    (h, c), ys = how(step, start, xs, **options)
    return (h * c).sum() + (ys**2).sum()


def arguments(length):
    rng = np.random.default_rng(0)
    return jax.device_put(rng.normal(size=(3, 3))), jax.device_put(rng.normal(size=(length, 2, 3)))


@functools.cache
def traced(turns, length, budget):
    """Gradients within a budget, by `turns` alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "unrolls", lambda *_, **__: [(turns, 1.0)])
        budgeted = functools.partial(loss, how=remat.scan, budget=budget)
        return jax.jit(jax.grad(budgeted, (0, 1))).trace(*arguments(length))


@functools.cache
def plain_gradients(length):
    return jax.jit(jax.grad(loss, (0, 1)))(*arguments(length))


@pytest.mark.filterwarnings("ignore:remat.scan")
@pytest.mark.parametrize(
    ("turns", "length", "budget"),
    [(IN_ORDER, 4, "min"), (IN_ORDER, 150, 12000), (LEAN, 150, 12000), (LEAN, 150, 20000)],
)
def test_gradients_are_those_of_scan(x64, turns, length, budget):
    gradients = traced(turns, length, budget).lower().compile()(*arguments(length))
    for found, wanted in zip(gradients, plain_gradients(length), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)


def test_small_steps_are_unrolled_on_gpus(monkeypatch):
    assert unrolls(1, SMALL) == [(ONE, 1.0)]
    monkeypatch.setattr(unroll, "traced_device", lambda: type("Device", (), {"platform": "gpu"}))
    assert [turns for turns, _ in unrolls(1, SMALL)] == [FAST, IN_ORDER, LEAN]
    assert [turns for turns, _ in unrolls(1, SMALL, least=True)] == [LEAN]
    for said, step in ((1, LARGE), (3, SMALL), (True, SMALL)):
        assert unrolls(said, step) == [(Unroll(said, said), 1.0)]


@pytest.mark.parametrize(
    ("runs", "chosen", "compiled"),
    [
        ({FAST: 1, IN_ORDER: 1, LEAN: 1}, FAST, [FAST]),
        ({FAST: 2.5, IN_ORDER: 2, LEAN: 1.9}, FAST, [FAST]),
        ({FAST: 2.5, IN_ORDER: 1.2, LEAN: 1.9}, IN_ORDER, [FAST, IN_ORDER]),
        ({FAST: 9, IN_ORDER: 1.5, LEAN: 1}, IN_ORDER, [IN_ORDER]),
        ({IN_ORDER: 1.9, LEAN: 2}, IN_ORDER, [FAST, IN_ORDER]),
        ({IN_ORDER: 1.9, LEAN: 1.1}, LEAN, [FAST, IN_ORDER, LEAN]),
        ({FAST: 9, IN_ORDER: 9, LEAN: 2}, LEAN, [LEAN]),
        ({}, None, [FAST, IN_ORDER, LEAN]),
    ],
)
def test_the_best_of_the_plans_that_fit_is_taken(runs, chosen, compiled):
    """A plan fits with fast turns, but runs steps so often that slower turns and a better plan take less time. Plans that are
    too slow are not compiled."""
    seen = []

    def found(turns, worth):
        way = Way(None, LoopPlan(10, 1, 1), turns)
        if worth is not None and turns in runs and not worth(way):
            return None
        seen.append(turns)
        if turns in runs:
            return way
        if worth is None:
            raise ValueError("budget")
        return None

    seconds = lambda way: 2 + runs[way.unroll]
    all_turns = [(FAST, 0.55), (IN_ORDER, 0.77), (LEAN, 0.93)]
    if chosen is None:
        with pytest.raises(ValueError, match="budget"):
            with_unroll(all_turns, found, seconds, lambda: 3.0)
    else:
        assert with_unroll(all_turns, found, seconds, lambda: 3.0).unroll == chosen
    assert seen == compiled


def test_steps_without_residuals_wait_only_where_all_do(x64):
    barriers = lambda turns: str(traced(turns, 150, 12000).jaxpr).count("optimization_barrier")
    none, residuals, every = map(barriers, (FAST, IN_ORDER, Unroll(5, 5, "all")))
    assert none < residuals < every


def found_by_filling(worth, compiled=lambda way: 2 * way.plan.tail):
    """A plan's bytes by the model are its tail, half of what it takes; and the tails that were compiled."""
    tried = []
    choose = lambda room: Way(None, LoopPlan(1000, 1, room), ONE)
    way = filling(400, 100, choose, lambda way: tried.append(way.plan.tail) or compiled(way), 0, worth=worth)
    return way and way.plan.tail, tried


def test_plans_that_are_not_worth_it_are_not_compiled():
    assert 150 <= found_by_filling(None)[0] <= 200
    assert found_by_filling(lambda way: True)[0] >= 100
    assert found_by_filling(lambda way: way.plan.tail > 100) == (None, [400])
    assert found_by_filling(lambda way: way.plan.tail > 500) == (None, [])
    assert found_by_filling(lambda way: True, lambda way: None) == (None, [400])
    assert found_by_filling(None, lambda way: None) == (400, [400])
