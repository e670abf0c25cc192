"""Several steps in a turn of a loop: which are tried, and that they compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax import remat
from memjax._plan.schedule import unroll
from memjax._plan.schedule.execute import LoopPlan
from memjax._plan.schedule.unroll import ONE, Unroll, unrolls
from memjax.remat._scan import scan
from memjax.remat._scan.filling import with_unroll
from memjax.remat._scan.ways import Way

FAST, LITTLE, LEAN = Unroll(5, 5), Unroll(5, 5, "residuals"), Unroll(5, 1, "all")
SMALL, LARGE = [jnp.zeros(256)], [jax.ShapeDtypeStruct((1 << 22,), jnp.float32)]


def loss(params, xs, *, how=jax.lax.scan, **options):
    def step(carry, x):
        h, c = carry
        h = jnp.tanh(h @ params + x)
        return (h, c + h * jnp.sin(c)), h[:, 0]

    start = (jnp.zeros(xs.shape[1:], xs.dtype),) * 2
    (h, c), ys = how(step, start, xs, **options)
    return (h * c).sum() + (ys**2).sum()


@pytest.mark.filterwarnings("ignore:remat.scan")
@pytest.mark.parametrize(("length", "budget"), [(4, "min"), (150, 12000), (150, 20000)])
@pytest.mark.parametrize("turns", [LITTLE, LEAN])
def test_gradients_are_those_of_scan(x64, monkeypatch, turns, length, budget):
    monkeypatch.setattr(scan, "unrolls", lambda *_, **__: [(turns, 1.0)])
    rng = np.random.default_rng(0)
    params, xs = jnp.asarray(rng.normal(size=(3, 3))), jnp.asarray(rng.normal(size=(length, 2, 3)))
    exact = jax.grad(loss, (0, 1))(params, xs)
    budgeted = lambda params, xs: loss(params, xs, how=remat.scan, budget=budget)
    for found, wanted in zip(jax.grad(budgeted, (0, 1))(params, xs), exact, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)


def test_small_steps_are_unrolled_on_gpus(monkeypatch):
    assert unrolls(1, SMALL) == [(ONE, 1.0)]
    monkeypatch.setattr(unroll, "traced_device", lambda: type("Device", (), {"platform": "gpu"}))
    assert [turns for turns, _ in unrolls(1, SMALL)] == [FAST, LITTLE, LEAN]
    assert [turns for turns, _ in unrolls(1, SMALL, least=True)] == [LEAN]
    for said, step in ((1, LARGE), (3, SMALL), (True, SMALL)):
        assert unrolls(said, step) == [(Unroll(said, said), 1.0)]


@pytest.mark.parametrize(
    ("runs", "chosen", "compiled"),
    [
        ({FAST: 1, LITTLE: 1, LEAN: 1}, FAST, [FAST]),
        ({FAST: 2.5, LITTLE: 2, LEAN: 1.9}, FAST, [FAST]),
        ({FAST: 2.5, LITTLE: 1.2, LEAN: 1.9}, LITTLE, [FAST, LITTLE]),
        ({FAST: 9, LITTLE: 1.5, LEAN: 1}, LITTLE, [LITTLE]),
        ({LITTLE: 1.9, LEAN: 2}, LITTLE, [FAST, LITTLE]),
        ({LITTLE: 1.9, LEAN: 1.1}, LEAN, [FAST, LITTLE, LEAN]),
        ({FAST: 9, LITTLE: 9, LEAN: 2}, LEAN, [LEAN]),
        ({FAST: 9, LITTLE: 9, LEAN: 99}, LEAN, [LEAN]),
        ({}, None, [FAST, LITTLE, LEAN]),
    ],
)
def test_the_best_of_the_plans_that_fit_is_taken(runs, chosen, compiled):
    """A plan fits with fast turns, but runs steps so often that slower turns and a better plan take less time. Plans that are
    too slow are not compiled."""
    seen, tried = [], []

    def found(turns, worth):
        tried.append(turns)
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
    all_turns = [(FAST, 0.65), (LITTLE, 0.9), (LEAN, 1.09)]
    if chosen is None:
        with pytest.raises(ValueError, match="budget"):
            with_unroll(all_turns, found, seconds, lambda: 3.0)
    else:
        assert with_unroll(all_turns, found, seconds, lambda: 3.0).unroll == chosen
    assert seen == compiled
    assert tried == [FAST, LITTLE, LEAN][: len(tried)]
