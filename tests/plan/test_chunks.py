"""Plans that run a loop over time, with what leads to it and what follows, chunk by chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memjax
from memjax import Plan
from memjax._plan.flat import Flat
from memjax._plan.tile.rewrite import Tiling

LENGTH, BATCH, WIDTH = 70, 3, 8  # no number of chunks divides the length
ALLOW = ("recompute", "tile")


def parameters(dtype=float):
    names = {"embed": (5, WIDTH), "in": (WIDTH, WIDTH), "loop": (WIDTH, WIDTH), "hidden": (WIDTH, 4 * WIDTH)}
    names |= {"out": (4 * WIDTH, 6), "second": (WIDTH, WIDTH)}
    rng = np.random.default_rng(0)
    draw = lambda shape: jax.device_put(np.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), dtype))
    return {name: draw(shape) for name, shape in names.items()}


def data(length=LENGTH, batch=BATCH, dtype=float):
    rng = np.random.default_rng(1)
    x = jax.device_put(np.asarray(rng.normal(size=(length, batch, 5)), dtype))
    return x, jax.device_put(rng.integers(6, size=(length, batch)))


def loop(p, x, reverse=False):
    return lax.scan(lambda h, x: ((h := jnp.tanh(x + h @ p)), h), jnp.ones(x.shape[1:], x.dtype), x, reverse=reverse)


def head(p, h, labels):
    logits = jax.nn.relu(h @ p["hidden"]) @ p["out"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)


def one_loop(p, x, labels, reverse=False):
    """An embedding, a loop and a head; what the loop ends with counts, too."""
    end, h = loop(p["loop"], jax.nn.relu(x @ p["embed"]) @ p["in"], reverse)
    return head(p, h, labels).mean() + (end**2).sum()


def two_loops(p, x, labels):
    """The second one reads the first one's outputs; something is computed for each step that the caller gets."""
    _, h = loop(p["loop"], x @ p["embed"])
    _, h = loop(p["second"], jax.nn.gelu(h) @ p["in"])
    losses = head(p, h, labels)
    return losses.sum() / losses.size, losses[..., 0]


def batch_first(p, x, labels):
    """Time is the second axis outside of the loop."""
    h = loop(p["loop"], jnp.swapaxes(jnp.swapaxes(x, 0, 1) @ p["embed"], 0, 1))[1]
    return head(p, jnp.swapaxes(h, 0, 1), jnp.swapaxes(labels, 0, 1)).mean()


def in_pieces(p, x, labels):
    """Linear attention: a turn goes through two steps of a sequence, whose axis is the second, and what it reads is split."""
    pieces = lambda a: jnp.moveaxis(a.reshape(a.shape[0], -1, 2, WIDTH), 1, 0)

    def turn(s, qkv):
        q, k, v = qkv
        y = jnp.einsum("bid,bde->bie", q, s) + jnp.einsum("bid,bjd,bje->bie", q, k, v)
        return s + jnp.einsum("bid,bie->bde", k, v), y

    h = jnp.swapaxes(x, 0, 1) @ p["embed"]
    q, k = jnp.split(jax.nn.sigmoid(h @ jnp.concatenate([p["in"], p["second"]], 1)), 2, -1)
    _, y = lax.scan(turn, jnp.zeros((x.shape[1], WIDTH, WIDTH)), tuple(map(pieces, (q, k, h))))
    return head(p, h + jnp.moveaxis(y, 0, 1).reshape(h.shape), jnp.swapaxes(labels, 0, 1)).mean()


def in_chunks(f, *args, tile=None):
    """`f` with its one recurrence in chunks of so many steps, or in the largest that plans try."""
    flat = Flat(f, args, {})
    program = flat.program()
    tiling = Tiling(program.closed, program.types, program.has_cotangent, {}, "cpu")
    [chunks] = tiling.recurrences
    assert chunks.length > chunks.tile
    closed, out = (
        tiling.rewritten([chunks._replace(tile=tile or chunks.tile)]),
        jax.tree.structure(jax.eval_shape(f, *args)),
    )
    return lambda *args: jax.tree.unflatten(
        out, jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(args))
    )


def equal(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), found, wanted)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "f",
    [functools.partial(one_loop, reverse=True), two_loops, batch_first, in_pieces],
    ids=["reverse", "two", "batch first", "pieces"],
)
def test_gradients_are_those_of_the_whole(f):
    args, has_aux = (parameters(), *data()), f is two_loops
    gradient = lambda f: jax.jit(jax.value_and_grad(f, has_aux=has_aux))(*args)
    equal(gradient(in_chunks(f, *args)), gradient(f))


def test_little_is_there_at_once():
    """A sixteenth of the steps, and the state before each of the chunks."""
    args = parameters(jnp.float32), *data(256, 16, jnp.float32)
    options = memjax.remat_compiler_options("cpu")
    gradient = lambda f: jax.jit(jax.value_and_grad(f)).lower(*args).compile(options)
    nbytes = lambda compiled: compiled.memory_analysis().temp_size_in_bytes
    whole = gradient(one_loop)
    plain = nbytes(whole)
    plan = memjax.plan(one_loop, *args, budget=plain // 8, allow=ALLOW)
    [chunks] = plan.tiled
    assert "a loop over time" in chunks.what
    assert chunks.length == 256 > chunks.tile
    compiled = gradient(memjax.planned(one_loop, plan=Plan.from_json(plan.to_json())))
    assert nbytes(compiled) <= plain // 8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), compiled(*args), whole(*args))


def test_chunks_by_hand_take_no_less_memory():
    """The plan has chunks of eight steps, too. It keeps nearly all states between chunks: the code by hand keeps all."""
    args = parameters(jnp.float32), *data(160, 16, jnp.float32)

    def by_hand(p, x, labels):
        def chunk(h, rows):
            end, hs = lax.scan(lambda h, x: ((h := jnp.tanh(x + h @ p["loop"])), h), h, rows[0] @ p["embed"] @ p["in"])
            return end, head(p, hs, rows[1]).sum()

        rows = jax.tree.map(lambda a: a.reshape(20, 8, *a.shape[1:]), (x, labels))
        return lax.scan(jax.checkpoint(chunk), jnp.ones((16, WIDTH)), rows)[1].sum()

    def plain(p, x, labels):
        return head(p, loop(p["loop"], x @ p["embed"] @ p["in"])[1], labels).sum()

    gradient = jax.jit(jax.grad(by_hand), compiler_options=memjax.remat_compiler_options("cpu"))
    budget = gradient.lower(*args).compile().memory_analysis().temp_size_in_bytes
    plan = memjax.plan(plain, *args, budget=budget, allow=ALLOW)
    assert plan.tiled[0].tile == 8
    assert all(one.in_blocks.slots > 15 for one in plan.stretches if one.in_blocks and one.in_blocks.slots)


def test_gradients_of_shared_values_are_summed_in_float32():
    """In bfloat16 each of the chunks would be rounded away beside the sum of those before."""
    x = jnp.ones((1024, 1, 1), jnp.bfloat16)

    def f(w, x):
        _, h = lax.scan(lambda c, x: (c, x + 0 * c), jnp.zeros((1, 1), jnp.bfloat16), x)
        return jnp.sum((jnp.tanh(h @ w) * jnp.bfloat16(2) + h @ w).astype(jnp.float32))

    w = jnp.full((1, 64), 0.5, jnp.bfloat16)
    found, wanted = (jax.jit(jax.grad(one))(w, x).astype(float) for one in (in_chunks(f, w, x, tile=8), f))
    np.testing.assert_allclose(found, wanted, rtol=4e-3)
