"""What costs people days is said; what is as it should be is not."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import memjax

POLICIES = jax.checkpoint_policies


def loss_of(block):
    def loss(weights, x):
        for w in weights:
            x = block(w, x)
        return jnp.mean(x * x)

    return loss


def named(w, x):
    return jnp.sin(jnp.sin(checkpoint_name(x @ w, "hidden")))


def found(block, layers=2, dtype=jnp.float32, transform=lambda f: f):
    weights, x = [jnp.ones((32, 32), dtype)] * layers, jnp.ones((64, 32), dtype)
    return memjax.explain(transform(loss_of(block)), weights, x).warnings


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.jit(jax.grad(f))], ids=["loss", "gradient"])
@pytest.mark.parametrize(
    "policy",
    [
        POLICIES.save_only_these_names("hiden"),
        memjax.remat.policies.save("hiden"),
        POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=["hiden"],
            names_which_can_be_offloaded=["hidden"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ],
    ids=["jax", "memjax", "offload"],
)
def test_a_policys_name_that_nothing_has(policy, transform):
    (text,) = found(jax.checkpoint(named, policy=policy), transform=transform)
    assert "names 'hiden', but nothing is called so (did you mean 'hidden'?)" in text


def square(y):
    return y * y


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (jax.checkpoint(named, policy=POLICIES.everything_saveable), "computes nothing again"),
        (lambda w, x: jax.checkpoint(jnp.sin)(x @ w), "it saves nothing"),
        (lambda w, x: square(jnp.pad(x @ w, ((0, 0), (0, 32))))[:, :32], "kept as [64, 64], padded from [64, 32]"),
        (lambda w, x: square(jnp.repeat((x @ w)[:, None], 4, 1)).sum(1), "repeated from"),
    ],
    ids=["everything", "useless", "padded", "repeated"],
)
def test_it_is_said(block, expected):
    (text,) = set(found(block))
    assert expected in text
    assert "test_warnings.py:" in text or "checkpoint" in text


def test_wide_copies_of_narrow_arrays():
    block = lambda w, x: square((x @ w).astype(jnp.float32)).astype(jnp.bfloat16)
    (text,) = found(block, dtype=jnp.bfloat16)
    assert "kept as float32, though it is a copy of bfloat16" in text


def test_layers_that_could_be_a_scan():
    (text,) = found(lambda w, x: jnp.sin(x @ w), layers=8)
    assert "unrolled" in text
    assert found(lambda w, x: jnp.sin(x @ w), layers=4) == ()


@pytest.mark.parametrize(
    "block",
    [
        named,
        jax.checkpoint(named),
        jax.checkpoint(named, policy=POLICIES.save_only_these_names("hidden")),
        jax.checkpoint(named, policy=POLICIES.dots_saveable),
    ],
    ids=["plain", "checkpoint", "name", "dots"],
)
def test_nothing_is_said_of_what_is_right(block):
    assert found(block) == ()
