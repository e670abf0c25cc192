"""Losses of logits in whole steps under `memjax.jit`, tile by tile with their gradients."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from memjax._jit.derivatives.body import Body
from memjax._plan.tile.passes import TileOn
from tests.jit.steps import held
from tests.jit.test_jit import close, copied

VOCABULARY, WIDTH, TOKENS = 2048, 32, 512
TILES = "recompute", "tile"
LOGITS = 4 * VOCABULARY * TOKENS


def mean(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def masked(logits, labels):
    """A mean over those that count, as many as the labels say, with a metric."""
    mask = (labels > 100).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    return -(picked * mask).sum() / mask.sum()


def one_hot_and_z_loss(logits, labels):
    normalizers = jax.nn.logsumexp(logits, -1)
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, VOCABULARY)).mean() + 1e-4 * jnp.mean(
        normalizers**2
    )


def weighted_and_scaled(logits, labels):
    weights = jnp.linspace(0.5, 1.5, TOKENS).reshape(labels.shape)
    return 1024 * jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def squared(logits, labels):
    """Its gradient depends on the sum: it is known when all tiles have been gone through."""
    return mean(logits, labels) ** 2


def parameters():
    rng = np.random.default_rng(0)
    return jax.device_put([rng.normal(size=(WIDTH, columns)) / 6 for columns in (WIDTH, WIDTH, VOCABULARY)])


def batch(shape=(TOKENS,)):
    rng = np.random.default_rng(1)
    return jax.device_put((rng.normal(size=(*shape, WIDTH)), rng.integers(VOCABULARY, size=shape)))


def step_of(of_logits):
    """One metric is made in the loss, another of the logits that come with it: behind the backward pass."""

    def loss(ws, x, labels):
        logits = jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2]
        return of_logits(logits, labels), (logits, jnp.mean(logits.max(-1)))

    def step(ws, x, labels):
        (value, (logits, most)), gradients = jax.value_and_grad(loss, has_aux=True)(ws, x, labels)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)
        return new, value, {"accuracy": jnp.mean(logits.argmax(-1) == labels), "most": most}

    return step


CASES = [
    (mean, (TOKENS,)),
    (masked, (4, TOKENS // 4)),
    (one_hot_and_z_loss, (TOKENS,)),
    (weighted_and_scaled, (4, 128)),
]


@pytest.mark.parametrize(("of_logits", "shape"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_logits_are_never_whole(of_logits, shape):
    step, args = step_of(of_logits), (parameters(), *batch(shape))
    plain = jax.jit(step, donate_argnums=0)
    # Less than with whole logits and everything else computed again.
    budget = held(plain.lower(*args).compile()) - 9 * LOGITS // 8
    jitted = memjax.jit(step, budget=budget, allow=TILES, donate_argnums=0)
    plan = jitted.plan(*args)
    assert [one.nbytes for one in plan.tiled] == [LOGITS]
    assert not any(plan.passes)  # the tiles were enough
    assert not plan.as_written
    compiled = jitted.lower(*args).compile(memjax.remat_compiler_options())
    assert plan.nbytes == held(compiled) < plan.plain_nbytes - LOGITS
    close(jitted(*copied(args)), plain(*copied(args)))


def test_metrics_of_logits_behind_the_gradient_of_a_deep_network_do_not_keep_them_whole():
    """The region of the loss ends in the backward pass, once that reads more than the logits are, and before the metrics."""

    def loss(ws, x, labels):
        for w in ws[:-1]:
            x = x + jnp.tanh(x @ w)
        logits = x @ ws[-1]
        return mean(logits, labels), logits

    def step(ws, x, labels):
        (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(ws, x, labels)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value, jnp.mean(logits.argmax(-1) == labels)

    rng = np.random.default_rng(0)
    ws = [rng.normal(size=(128, 128)) / 12 for _ in range(8)] + [np.repeat(parameters()[2], 4, 0)]
    args = *jax.device_put((ws, rng.normal(size=(TOKENS, 128)))), batch()[1]
    closed = jax.make_jaxpr(step)(*args)
    body = Body(closed, TileOn("cpu"))
    assert [one.nbytes for one in body.tiled] == [LOGITS]
    out = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(step, *args)), body.evaluate(jax.tree.leaves(args), {}))
    close(out, jax.jit(step)(*args))


def test_tiles_are_in_the_text_of_a_plan():
    step, args = step_of(mean), (parameters(), *batch())
    plan = memjax.jit(step, budget="min", allow=TILES).plan(*args)
    again = memjax.jit(step, plan=type(plan).from_json(plan.to_json()))
    close(again(*args), jax.jit(step)(*args))
    assert held(again.lower(*args).compile(memjax.remat_compiler_options())) == plan.nbytes
    changed = json.loads(plan.to_json())
    changed["tiled"][0][0] += 1
    with pytest.raises(ValueError, match="plan must be of this step"):
        memjax.jit(step, plan=type(plan).from_json(json.dumps(changed)))(*args)
    fits = memjax.jit(step, budget=plan.plain_nbytes).plan(*args)
    assert fits.as_written
    assert not fits.tiled


def test_what_needs_the_whole_sum_is_left_as_it_is():
    step, args = step_of(squared), (parameters(), *batch())
    jitted = memjax.jit(step, budget="min", allow=TILES)
    assert not jitted.plan(*args).tiled
    close(jitted(*args), jax.jit(step)(*args))


def test_a_cotangent_that_is_computed_and_repeated_goes_into_the_tiles():
    def step(w, x, labels):
        def loss(w):
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1))

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    args = parameters()[2], *batch()
    jitted = memjax.jit(step, budget="60%", allow=TILES)
    assert [one.nbytes for one in jitted.plan(*args).tiled] == [LOGITS]
    close(jitted(*args), jax.jit(step)(*args))


def test_tiles_in_a_loop_that_accumulates_gradients():
    step = step_of(mean)
    x, labels = batch((2, TOKENS))

    def accumulated(ws, x, labels):
        def one(total, microbatch):
            new, value, _ = step(ws, *microbatch)
            return jax.tree.map(lambda total, a, b: total + (a - b), total, new, ws), value

        total, values = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, ws), (x, labels))
        return jax.tree.map(jnp.add, ws, total), values

    args = parameters(), x, labels
    budget = held(jax.jit(accumulated).lower(*args).compile()) - LOGITS
    jitted = memjax.jit(accumulated, budget=budget)
    assert len(jitted.plan(*args).tiled) == 1
    close(jitted(*args), jax.jit(accumulated)(*args))
    with pytest.raises(ValueError, match="the least possible is"):
        memjax.jit(accumulated, budget=budget, allow=("recompute",)).plan(*args)


def test_two_updates_one_after_the_other():
    once, args = step_of(mean), (parameters(), *batch())

    def step(ws, x, labels):
        ws, first, _ = once(ws, x, labels)
        ws, second, _ = once(ws, x, labels)
        return ws, first, second

    jitted = memjax.jit(step, budget=held(jax.jit(step).lower(*args).compile()) - LOGITS)
    assert len(jitted.plan(*args).tiled) == 2
    close(jitted(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("check_vma", [False, True])
def test_tiles_of_a_device(check_vma):
    """Within a `shard_map`; types that say over which axes values vary are not known outside of theirs."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def of_device(ws, x, labels):
        loss = lambda ws: mean(jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2], labels)
        found = jax.value_and_grad(loss)(jax.lax.pcast(ws, "d", to="varying") if check_vma else ws)
        value, gradients = jax.lax.pmean(found, "d")
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value

    specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": P(), "check_vma": check_vma}
    step = jax.shard_map(of_device, mesh=mesh, **specs)
    x, labels = (jax.device_put(a, NamedSharding(mesh, P("d"))) for a in batch((2 * TOKENS,)))
    args = jax.device_put(parameters(), NamedSharding(mesh, P())), x, labels
    jitted = memjax.jit(step, budget="min", allow=TILES)
    assert len(jitted.plan(*args).tiled) == (not check_vma)
    close(jitted(*args), jax.jit(step)(*args))


def test_a_tied_embedding_in_few_bits_and_dropout():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)])
            self.norm = nnx.LayerNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = x + self.dropout(nnx.gelu(layer(x)))
            return self.embedding.attend(self.norm(x)).astype(jnp.float32)

    def step(model, optimizer, tokens):
        def loss(model):
            return mean(model(tokens[:, :-1]), tokens[:, 1:])

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    def trained(jitted):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        values = [jitted(model, optimizer, tokens) for _ in range(3)]
        return values, nnx.state(model, nnx.Param)

    tokens = jax.device_put(np.random.default_rng(3).integers(VOCABULARY, size=(8, 129)))
    planned = memjax.jit(step, budget="33%", allow=TILES, donate_argnums=(0, 1))
    found, expected = trained(planned), trained(nnx.jit(step))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=1e-3)  # sums in bfloat16 are rounded otherwise
    model = Model(nnx.Rngs(0))
    plan = planned.plan(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), tokens)
    assert [one.what.split()[0] for one in plan.tiled] == [f"bfloat16[8,128,{VOCABULARY}]"]
    assert plan.nbytes < plan.plain_nbytes / 3
