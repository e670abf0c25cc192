"""A remedy that is followed saves what it says."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import memjax
from memjax._program import gradient, traced

from . import models

DOTS = jax.checkpoint_policies.dots_saveable


def kept(f, args):
    return gradient(traced("explain", f, args, {})).residuals.device.nbytes


def first_remedy(explanation, kind, path):
    row = next(row for row in explanation.rows if row.path == path and row.remedies and row.remedies[0].kind == kind)
    return row.remedies[0]


def test_linen_transformer():
    """Both ways to checkpoint its feed-forward layers, and the layers."""
    f, args = models.language_model(layers=2)
    explanation = memjax.explain(f, *args)
    remedies = explanation.rows[0].remedies
    free, mlp, block = (
        remedies[0],
        *(
            next(
                one
                for one in remedies
                if one.kind == "recompute" and f"round Transformer/layers[0..1]{inner}, 2 times" in one.how
            )
            for inner in ("/mlp", "")
        ),
    )
    assert free.kind == "free"
    assert [free.milliseconds, mlp.milliseconds, block.milliseconds] == sorted(
        remedy.milliseconds for remedy in (free, mlp, block)
    )
    plain = kept(f, args)
    with_mlp = lambda policy: functools.partial(models.Block, feed_forward=nn.remat(models.FeedForward, policy=policy))
    for remedy, layer in ((free, with_mlp(DOTS)), (mlp, with_mlp(None)), (block, nn.remat(models.Block))):
        assert remedy.saves == pytest.approx(plain - kept(*models.language_model(block=layer)), rel=0.01)
    assert free.flops == 0
    assert mlp.flops == 2 * 2 * (models.BATCH * models.TOKENS) * models.WIDTH * 4 * models.WIDTH


def test_llama_in_a_scan(monkeypatch):
    f, args = models.llama(checkpoint=lambda f: f)
    explanation = memjax.explain(f, *args)
    plain = kept(f, args)
    remedy = first_remedy(explanation, "free", "layer/feed_forward")
    inside = jax.checkpoint(models.feed_forward, policy=DOTS)
    remedies = explanation.rows[0].remedies
    block = next(one for one in remedies if one.kind == "recompute" and "round layer, 4 times" in one.how)
    assert block.saves == pytest.approx(plain - kept(*models.llama()), rel=0.1)
    monkeypatch.setattr(models, "feed_forward", inside)
    assert remedy.saves == pytest.approx(plain - kept(*models.llama(checkpoint=lambda f: f)), rel=0.1)


def test_tiles_of_the_sequence(monkeypatch):
    f, args = models.llama(checkpoint=lambda f: f)
    explanation = memjax.explain(f, *args)
    tiles = {remedy for row in explanation.rows for remedy in row.remedies if remedy.kind == "tile"}
    assert {remedy.how for remedy in tiles} == {
        "memjax.remat.tiled round layer/feed_forward"
    }  # attention mixes positions
    plain = kept(f, args)
    tiled = memjax.remat.tiled(models.feed_forward, in_axes=(None, 1), out_axes=1, tile=8)
    monkeypatch.setattr(models, "feed_forward", tiled)
    assert tiles.pop().saves == pytest.approx(plain - kept(*models.llama(checkpoint=lambda f: f)), rel=0.1)


def test_plain_classes_that_share_a_path(monkeypatch):
    f, args = models.pytree()
    explanation = memjax.explain(f, *args)
    plain, call = kept(f, args), models.Residual.__call__
    free, recompute = explanation.rows[0].remedies[:2]
    assert (free.kind, recompute.kind) == ("free", "recompute")
    assert all("round Net/Residual, 3 times" in remedy.how for remedy in (free, recompute))
    for remedy, policy in ((free, DOTS), (recompute, None)):
        monkeypatch.setattr(models.Residual, "__call__", jax.checkpoint(call, policy=policy))
        assert remedy.saves == pytest.approx(plain - kept(*models.pytree()), rel=0.1)


def test_logits():
    x, w = jnp.ones((512, 16)), jnp.ones((1024, 16))
    labels = jnp.zeros(512, jnp.int32)

    def loss(x, w):
        return optax.softmax_cross_entropy_with_integer_labels(jnp.sin(x) @ w.T, labels).mean()

    explanation = memjax.explain(loss, x, w)
    remedy = explanation.rows[0].remedies[0]
    assert (remedy.kind, remedy.is_exact) == ("fused loss", True)
    followed = lambda x, w: memjax.linear_cross_entropy(jnp.sin(x), w, labels)
    assert remedy.saves == pytest.approx(kept(loss, (x, w)) - kept(followed, (x, w)), rel=0.1)
    assert any("logits of shape [512, 1024]" in text for text in explanation.warnings)


def test_a_small_head_is_no_vocabulary():
    f, args = models.linen_cnn()
    explanation = memjax.explain(f, *args)
    assert not any("logits" in text for text in explanation.warnings)
    assert not any(remedy.kind == "fused loss" for row in explanation.rows for remedy in row.remedies)


def test_eight_bits():
    def loss(f, w, x):
        return jnp.sum(f(w, x))

    def f(w, x):
        return jnp.sin(jnp.tanh(x @ w) * 2)

    w, x = jnp.ones((64, 64)), jnp.ones((256, 64))
    explanation = memjax.explain(functools.partial(loss, f), w, x)
    rows = [row for row in explanation.rows for remedy in row.remedies if remedy.kind == "8 bits"]
    assert len(rows) == len(explanation.rows) > 0
    for row in explanation.rows:
        remedy = next(remedy for remedy in row.remedies if remedy.kind == "8 bits")
        code = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(encoded(row)))
        assert remedy.saves == row.bytes - row.count * code
        assert not remedy.is_exact


def encoded(row):
    return jax.eval_shape(memjax.compress.BlockQuantized(8).encode, jax.ShapeDtypeStruct(row.shape, row.dtype))


def test_one_checkpoint_round_everything_is_no_remedy():
    """It keeps nothing, and computes everything at once: the peak would stay."""

    def model(w, x):
        for _ in range(3):
            x = jnp.sin(x @ w)
        return x

    explanation = memjax.explain(lambda w, x: model(w, x).sum(), jnp.ones((64, 64)), jnp.ones((256, 64)))
    assert not any(remedy.kind == "recompute" for row in explanation.rows for remedy in row.remedies)
