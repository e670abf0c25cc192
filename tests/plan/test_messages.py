"""What a budget that is too small is answered with: figures that agree, the tool that helps, and where in the model."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import memjax
from tests.plan.networks import inputs, parameters, unrolled_loss


def refusal(f, *args, budget=1000):
    with pytest.raises(ValueError, match="the least possible") as error:
        memjax.plan(f, *args, budget=budget)
    return str(error.value)


def test_a_part_is_no_more_than_the_whole():
    for rows in (64, 1024):
        said = refusal(unrolled_loss, parameters(jnp.float32), inputs(jnp.float32, rows))
        [least, own] = re.findall(r"(?:least possible is|with about) ([\d.]+ \w+)", said)
        kilobytes = lambda text: float(text.split()[0]) * {"KiB": 1, "MiB": 1024}[text.split()[1]]
        assert kilobytes(own) <= kilobytes(least)
        assert "memjax.remat.tiled" in said


def over_time(w, xs):
    return jnp.mean(jax.lax.scan(lambda c, x: (jnp.tanh(jnp.sin(c @ w) + x), None), xs[0], xs)[0] ** 2)


def test_a_loop_over_time_is_sent_to_schedules():
    args = jnp.ones((16, 16)), jnp.ones((200, 8, 16))
    said = refusal(over_time, *args)
    assert "memjax.remat.scan" in said
    assert "remat.tiled" not in said  # which refuses loops
    rows = memjax.explain(over_time, *args).rows
    assert rows[0].remedies[0].kind == "schedule"
    assert "memjax.remat.scan" in rows[0].remedies[0].how
    assert 0.8 * rows[0].bytes < rows[0].remedies[0].saves < rows[0].bytes


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(32)(jnp.sin(nn.Dense(128)(x))))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = Block()(x)
        return x


def test_modules_are_named():
    model, x = Net(), jnp.ones((64, 32))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), x))
    loss = lambda params, x: jnp.mean(model.apply(params, x) ** 2)
    assert re.search(r"Net/Block_\d.*test_messages\.py:\d+", refusal(loss, params, x))
    least = memjax.plan(loss, params, x, budget="min").nbytes
    assert re.search(r"Net/Block_\d, test_messages\.py:\d+", str(memjax.plan(loss, params, x, budget=2 * least)))
