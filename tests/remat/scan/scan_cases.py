"""What the tests of `remat.scan` run: a small recurrent cell with every kind of leaf, and ways to keep its states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from memjax.remat._scan.step import StepBackward, trace_step

WIDTH = 3
HIDDEN = {"slots": 4, "strategy": "hidden"}
MIXED = {"slots": 9, "strategy": "mixed"}
LEAST = {"budget": "min"}
WAYS = [
    {"slots": 1, "strategy": "hidden"},
    HIDDEN,
    {"slots": 3, "strategy": "internal"},
    MIXED,
    {"slots": 100},  # more than there is to keep
    {"budget": 3000},  # a table of single steps
    {"budget": 4000},  # of both kinds of states
    {"budget": 5000},  # nested loops and a tail
    {"budget": "1MiB"},  # everything is kept
]


def arguments(length):
    """(parameters, first hidden state, xs)."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jax.device_put(rng.normal(size=shape))
    params = {name: normal(WIDTH, WIDTH) for name in "wu"}
    return params, normal(2, WIDTH), normal(length, 2, WIDTH)


def loss(scan, params, h, xs, **options):
    """Run the cell with `scan`; gradients reach closed-over values, the first carry, xs and outputs."""

    def cell(carry, x):
        h = jnp.tanh(carry["h"] @ params["w"] + x @ params["u"])
        return {"h": h, "n": carry["n"] + 1}, {"y": jnp.sin(h) * x, "n": carry["n"]}

    carry, ys = scan(cell, {"h": h, "n": 0}, xs, **options)
    return (carry["h"] ** 2).sum() + (ys["y"] ** 3).sum()


def lstm(params, carry, x):
    """One step of an LSTM: residuals of three carries."""
    h, s = carry
    i, f, g, o = jnp.split(x @ params["wi"] + h @ params["wh"] + params["b"], 4, -1)
    s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(s), s), h.sum()


def lstm_shapes(width, batch, length):
    """(parameters, carry, xs) as shapes, in single precision."""

    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"wi": floats(width, 4 * width), "wh": floats(width, 4 * width), "b": floats(4 * width)}
    return params, (floats(batch, width),) * 2, floats(length, batch, width)


def lstm_step(width, batch):
    """(step, carry, how to backpropagate it) of the LSTM, all parameters and inputs differentiated."""
    params, carry, xs = lstm_shapes(width, batch, 1)
    params, carry, xs = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), (params, carry, xs))
    step, _ = trace_step(functools.partial(lstm, params), carry, xs)
    return step, carry, StepBackward(step, [True] * len(step.consts), [True])


def close(got, want, tolerance=1e-12):
    """Assert that two trees of arrays are equal up to a tolerance, relative and absolute."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


def stored_bytes(plan, carry, kept):
    """Bytes that a plan keeps for the backward pass: states of `carry` bytes, residuals of `kept` bytes per step.

    The tail's residuals are gone before the first block's are made, so the larger of the two counts; unless the latter have
    rows of their own from the start.
    """
    states = plan.rows + sum(plan.levels[1:])
    working = max(plan.tail, plan.block if plan.blocks else 0)
    if plan.keeps_residuals and not plan.tail_among_slots:
        working = plan.block + plan.tail
    if plan.schedule is not None and plan.schedule.strategy == "internal":
        working += (plan.rows - 1) * plan.block
    return states * carry + working * kept
