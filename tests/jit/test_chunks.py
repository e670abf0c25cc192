"""Whole steps under `memjax.jit` whose loops over time run in chunks, in both passes, with what leads to them and follows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import memjax
from memjax._jit.derivatives.body import Body
from memjax._plan.tile.passes import TileOn
from tests.plan.test_chunks import (
    ALLOW,
    batch_first,
    data,
    equal,
    head,
    in_pieces,
    loop,
    one_loop,
    parameters,
    two_loops,
)

ADAM = optax.adam(0.1)


def step(f, state, x, labels, has_aux=False):
    p, opt = state
    loss, gradient = jax.value_and_grad(f, has_aux=has_aux)(p, x, labels)
    updates, opt = ADAM.update(gradient, opt, p)
    return (optax.apply_updates(p, updates), opt), loss


def accumulated(state, x, labels):
    """Gradients of halves of the batch are added up in a loop."""
    p, opt = state
    halves = jax.tree.map(lambda a: jnp.stack(jnp.split(a, 2, 1)), (x, labels))
    add = lambda total, half: (jax.tree.map(jnp.add, total, jax.grad(one_loop)(p, *half)), None)
    gradient, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, p), halves)
    updates, opt = ADAM.update(gradient, opt, p)
    return optax.apply_updates(p, updates), opt


def normalized(p, x, labels):
    """Losses relative to their mean and spread over all steps, through which gradients flow; a mask says which steps count."""
    losses = head(p, loop(p["loop"], jax.nn.relu(x @ p["embed"]) @ p["in"])[1], labels)
    mask = (labels[..., None] > 0).astype(losses.dtype)
    losses = losses * mask / mask.sum()
    return (((losses - losses.mean()) / losses.std()) ** 4).mean()


def initial(dtype=float):
    p = parameters(dtype)
    return p, ADAM.init(p)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("f", "length", "tile"),
    [
        (functools.partial(step, functools.partial(one_loop, reverse=True)), 70, 14),
        (functools.partial(step, two_loops, has_aux=True), 74, 18),
        (functools.partial(step, batch_first), 70, 14),
        # Two steps are a turn.
        (functools.partial(step, in_pieces), 70, 7),
        (functools.partial(step, in_pieces), 74, 9),
        (functools.partial(step, normalized), 74, 18),
        (accumulated, 70, 14),
        (accumulated, 74, 18),
    ],
    ids=lambda one: getattr(getattr(one, "args", [one])[0], "__name__", None),
)
def test_steps_are_those_of_the_whole(f, length, tile):
    """Whether the number of steps can be divided by a number like a quarter of it, or not."""
    args = initial(), *data(length, batch=4)
    closed = jax.make_jaxpr(f)(*args)
    body = Body(closed, TileOn("cpu", chunks=4))
    [chunks] = body.tiled
    assert (chunks.length, chunks.tile) == (length // 2 if "pieces" in str(f) else length, tile)
    equal(jax.jit(lambda *args: body.evaluate(args, {}))(*jax.tree.leaves(args)), jax.tree.leaves(jax.jit(f)(*args)))


def test_nothing_is_in_chunks_where_little_is_made_for_each_step():
    f = lambda p, x: jnp.sum(lax.scan(lambda h, x: ((h := jnp.tanh(x + h * p)), h), x[0], x)[1])
    closed = jax.make_jaxpr(jax.grad(f))(jnp.ones(4), jnp.ones((64, 4)))
    assert not Body(closed, TileOn("cpu", chunks=4)).tiled


def test_a_step_takes_an_eighth_of_its_memory():
    """It is found by the step as it is written, and the plan does the same from JSON."""
    args = initial(jnp.float32), *data(512, 16, jnp.float32)
    f = functools.partial(step, one_loop)
    plain = jax.jit(f, donate_argnums=0).lower(*args).compile(memjax.remat_compiler_options("cpu"))
    found = plain.memory_analysis()
    budget = found.argument_size_in_bytes + found.temp_size_in_bytes // 8
    fitting = memjax.jit(f, budget=budget, allow=ALLOW, donate_argnums=0)
    plan = fitting.plan(*args)
    [chunks] = plan.tiled
    assert "a loop over time" in chunks.what
    assert plan.chunks == 512 // chunks.tile
    assert plan.seconds > 1.05 * plan.plain_seconds  # each chunk runs forward again
    compiled = memjax.jit(f, plan=memjax.StepPlan.from_json(plan.to_json()), donate_argnums=0).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= found.temp_size_in_bytes // 8
    wanted = plain(*jax.device_put(args, may_alias=False))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), compiled(*args), wanted)
