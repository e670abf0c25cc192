"""`remat.scan` with encoded slots: what is recomputed from them, in what precision, in how many bytes."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import memjax
from memjax.compress import GroupQuantized
from memjax.remat import scan, schedule


class Doubled:
    """Codes are pytrees; what is decoded is twice what was encoded."""

    def encode(self, x):
        return {"value": -x, "none": None}

    def decode(self, code):
        return -2 * code["value"]


class Exact(Doubled):
    def decode(self, code):
        return -code["value"]


def step(carry, w):
    x, count = carry
    return (jnp.sin(x * w) + x, count + 1), x.sum()


def gradient(run, x, ws, **options):
    def loss(x, ws):
        (y, count), sums = run(step, (x, jnp.int32(0)), ws, **options)
        return (y * jnp.arange(y.size, dtype=y.dtype)).sum() + count.astype(y.dtype) + (sums**2).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, ws)


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
def test_a_codec_without_loss_changes_nothing(x64, slots):
    """Slots that the schedule does not use, and a carry that is partly integers."""
    x, ws = jnp.linspace(0.3, 1.0, 4), jnp.linspace(0.5, 1.5, 28).reshape(7, 4)
    found, expected = gradient(scan, x, ws, slots=slots, codec=Exact()), gradient(lax.scan, x, ws)
    chex.assert_trees_all_close(found, expected, rtol=1e-10)


@pytest.mark.parametrize("slots", [1, 2, 3, 6])
def test_results_are_exact_and_gradients_are_those_at_decoded_states(x64, slots):
    """The gradient of a factor has its input, doubled by each encoding, the other factors after it, and the cotangent."""
    ws = jnp.asarray([2.0, 3.0, 5.0, 7.0, 0.5, 4.0, 1.5])
    run = lambda ws: scan(lambda x, w: (x * w, None), jnp.ones(3), ws, slots=slots, codec=Doubled())[0].sum()
    value, found = jax.value_and_grad(run)(ws)
    assert value == 3 * ws.prod()
    chex.assert_trees_all_close(found, jnp.asarray(doublings(7, slots), ws.dtype) * value / ws, rtol=1e-12)


def doublings(length, slots):
    """What inputs of steps are multiplied by, from the actions of the schedule."""
    rows, now, factors = {0: 2}, 1, [0] * length
    for action in schedule(length, slots, strategy="hidden").actions:
        if action.kind == "load":
            now = rows[action.slot]
        elif action.kind == "store":
            rows[action.slot] = 2 * now
        elif action.kind == "keep":
            factors[action.start] = now
    return factors


def test_slots_take_the_bytes_of_codes():
    x, ws = jnp.ones((64, 1024)), jnp.ones((16, 1024))

    def temp_bytes(slots, **options):
        loss = lambda ws: scan(lambda x, w: (jnp.sin(x * w), None), x, ws, slots=slots, **options)[0].sum()
        compiled = jax.jit(jax.grad(loss)).lower(ws).compile(memjax.remat_compiler_options())
        return compiled.memory_analysis().temp_size_in_bytes

    each = (temp_bytes(12, codec=GroupQuantized(4)) - temp_bytes(4, codec=GroupQuantized(4))) / 8
    assert each <= 1.05 * x.size * (4 + 64 / 256) / 8
    assert temp_bytes(12) - temp_bytes(4) == pytest.approx(8 * x.nbytes, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 2, "strategy": "mixed"}, "codec must be None without slots or with another strategy than"),
        ({"budget": "1MiB"}, "codec must be None without slots or with another strategy than"),
        ({"slots": 2, "codec": 8}, "codec.encode must be a function, got None"),
    ],
)
def test_errors(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        scan(lambda x, w: (x * w, None), jnp.ones(3), jnp.ones(4), **{"codec": Exact(), **options})
