"""Wrong arguments: what is raised, and what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax

from .oracle import example


def call(**changes):
    x, w, labels = example(0, 12, 8, 33)
    arguments = {"x": x, "w": w, "labels": labels, **changes}
    return memjax.linear_cross_entropy(arguments.pop("x"), arguments.pop("w"), arguments.pop("labels"), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"labels": jnp.full((12,), 33)}, ValueError, r"labels: .*\[0, 33\).*got 33"),
        ({"labels": jnp.full((12,), -1)}, ValueError, r"labels: .*got -1"),
        ({"labels": jnp.zeros((12,), bool)}, TypeError, "labels: .*bool"),
        ({"labels": jnp.zeros((11,), jnp.int32)}, ValueError, r"labels: expected shape \(12,\)"),
        ({"labels": jnp.zeros((12, 32))}, ValueError, r"labels: soft targets .*\(12, 33\)"),
        ({"labels": [0] * 12}, TypeError, "labels: expected an array, got list"),
        ({"x": jnp.zeros((12, 9))}, ValueError, r"w: .*D = 8, but x has shape \(12, 9\)"),
        ({"w": jnp.zeros((8, 33))}, ValueError, r'is w stored the other way \(layout="dv"\)'),
        ({"w": jnp.zeros((33, 8), jnp.bfloat16)}, TypeError, r"w: expected x's dtype float32, got bfloat16"),
        ({"w": jnp.zeros((33, 8, 1))}, ValueError, "w: expected 2 dimensions"),
        ({"w": jnp.zeros((0, 8))}, ValueError, "w: expected at least one"),
        ({"x": jnp.zeros((12, 8), jnp.int32)}, TypeError, "x: expected a floating-point array, got int32"),
        ({"x": jnp.zeros(())}, ValueError, r"x: expected shape \(\.\.\., D\)"),
        ({"layout": "vD"}, ValueError, "layout: .*'vD'"),
        ({"bias": jnp.zeros((8,))}, ValueError, r"bias: expected shape \(33,\), got \(8,\)"),
        ({"weights": jnp.zeros((33,))}, ValueError, r"weights: .*class_weights\[labels\]"),
        ({"weights": jnp.zeros((12,), jnp.int32)}, TypeError, "weights: expected a floating-point"),
        ({"chunk": 0}, ValueError, "chunk: expected a positive integer.*got 0"),
        ({"chunk": 2.0}, TypeError, "chunk: "),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing: .*1.5"),
        ({"softcap": 0.0}, ValueError, "softcap: .*None"),
        ({"z_loss": float("nan")}, ValueError, "z_loss: expected a finite"),
        ({"logit_scale": jnp.ones(())}, TypeError, "logit_scale: .*multiply x"),
        ({"ignore_index": 0.5}, TypeError, "ignore_index: "),
        ({"reduction": "avg"}, ValueError, "reduction: .*'avg'"),
        ({"implementation": "fast"}, ValueError, "implementation: .*recompute.*'fast'"),
        ({"implementation": "full/jnp"}, ValueError, "implementation: .*'full/jnp'"),
        ({"implementation": "forward_grad", "reduction": "none"}, ValueError, 'reduction="none"'),
    ],
)
def test_raises(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="Triton runs there")
@pytest.mark.parametrize("algorithm", ["forward_grad", "recompute"])
def test_a_named_implementation_that_cannot_run(algorithm):
    with pytest.raises(ValueError, match="cannot run here: Triton kernels need a GPU"):
        call(implementation=f"{algorithm}/triton")


@pytest.mark.parametrize("implementation", ["full", "forward_grad", "recompute"])
@pytest.mark.parametrize("wrong", [33, -1, 2**31 - 1])
def test_labels_out_of_range_under_jit(implementation, wrong):
    """NaN, in the losses of those tokens and in the gradients."""
    x, w, labels = example(0, 12, 8, 33)
    labels = labels.at[5].set(wrong)
    loss, dw = jax.jit(
        jax.value_and_grad(lambda w, labels: memjax.linear_cross_entropy(x, w, labels, implementation=implementation))
    )(w, labels)
    assert np.isnan(loss)
    assert np.isnan(np.asarray(dw)).any()
    losses = jax.jit(lambda labels: memjax.linear_cross_entropy(x, w, labels, reduction="none"))(labels)
    assert np.isnan(np.asarray(losses)).nonzero()[0].tolist() == [5]


def test_wide_labels_do_not_wrap(x64):
    x, w, labels = example(0, 12, 8, 33)
    wide = labels.astype(jnp.int64).at[3].set(2**32 + 1)
    with pytest.raises(ValueError, match="labels: "):
        memjax.linear_cross_entropy(x, w, wide)
    losses = jax.jit(lambda y: memjax.linear_cross_entropy(x, w, y, reduction="none"))(wide)
    assert np.isnan(np.asarray(losses)).nonzero()[0].tolist() == [3]


@pytest.mark.parametrize("implementation", ["forward_grad", "recompute"])
def test_soft_targets_are_not_differentiated_silently(implementation):
    x, w, _ = example(0, 12, 8, 33)
    targets = jnp.full((12, 33), 1 / 33)

    def loss(x, targets):
        return memjax.linear_cross_entropy(x, w, targets, implementation=implementation)

    with pytest.raises(ValueError, match="stop_gradient"):
        jax.grad(loss, argnums=1)(x, targets)
    assert jax.grad(loss)(x, targets).shape == x.shape
