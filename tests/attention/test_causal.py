"""Attention of one device against plain products, and the kernel that is chosen for the platform that is compiled for."""

import chex
import jax
import jax.numpy as jnp
import pytest

from memjax._attention.choice import causal_attention
from memjax.remat import attention_in_groups
from memjax.shard.baselines import attention


def plain(q, k, v):
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits, -jnp.inf))
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def arrays(dtype=float, tokens=6, dim=3):
    normal = lambda i, heads: jax.random.normal(jax.random.key(i), (2, tokens, heads, dim), jnp.result_type(dtype))
    return normal(0, 4), normal(1, 2), normal(2, 2)


def gradient(f):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args).astype(jnp.result_type(float)))), (0, 1, 2))


def test_equals_plain_attention(x64):
    both = lambda f: jax.jit(lambda *args: (f(*args), gradient(f)(*args)))(*arrays())
    chex.assert_trees_all_close(*jax.device_get([both(causal_attention), both(plain)]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap])
def test_compiled_for_a_gpu_it_is_cudnn(transform):
    """On a machine without one as well: the platform is known when the program is lowered, not when it is traced."""
    q, k, v = (a[None] if transform is jax.vmap else a for a in arrays(jnp.bfloat16, 64, 8))
    traced = jax.jit(transform(gradient(causal_attention))).trace(q, k, v)
    text = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda")}
    assert "cudnn" not in text["cpu"]
    assert "__cudnn$fmhaSoftmax(" in text["cuda"]
    assert "__cudnn$fmhaSoftmaxBackward(" in text["cuda"]


def test_what_cudnn_cannot_do_is_not_cudnn():
    traced = jax.jit(causal_attention).trace(*arrays(jnp.float32, 64, 8))
    assert "cudnn" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_cudnn_by_name_elsewhere():
    q, k, v = arrays(jnp.bfloat16, 64, 8)
    with pytest.raises(
        ValueError, match='got "cudnn": cuDNN needs a GPU, and this is compiled for another platform; use'
    ):
        attention(q, k, v, implementation="cudnn")
    text = jax.jit(lambda *args: attention(*args, implementation="cudnn")).trace(q, k, v)
    assert "__cudnn$fmhaSoftmax(" in text.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("keep_attention", "runs"), [(False, 2), (True, 1)])
def test_kept_attention_runs_once(keep_attention, runs):
    """In groups it runs in both passes, unless its outputs are kept: cuDNN's forward kernel, as lowered for a GPU."""
    x, kernel = jnp.ones((1, 64, 16), jnp.bfloat16), jnp.ones((16, 2, 8), jnp.bfloat16)

    def loss(x, query, out):
        return attention_in_groups(x, query, query, query, out, keep_attention=keep_attention).astype(float).sum()

    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(x, kernel, kernel.reshape(2, 8, 16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == runs
