"""The kernels where they are meant to run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax._linear_cross_entropy import check
from tests.linear_cross_entropy.oracle import example, plain, relative_error, to_float64

pytestmark = pytest.mark.gpu

OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "logit_scale": 0.7}


def missing(kernels):
    if kernels == "mosaic":
        return check._no_mosaic(jnp.bfloat16)
    return check._no_triton(jnp.bfloat16)


@pytest.mark.parametrize(
    ("algorithm", "kernels"), [("forward_grad", "triton"), ("recompute", "triton"), ("recompute", "mosaic")]
)
@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_values_and_gradients(algorithm, kernels, options):
    if reason := missing(kernels):
        pytest.skip(reason)
    layout = "dv" if options else "vd"
    x, w, labels = example(0, 777, 320, 1088, dtype=jnp.bfloat16, layout=layout)
    arrays = {"x": x, "w": w}
    if options:
        arrays["bias"] = jnp.linspace(-1, 1, 1088).astype(jnp.bfloat16)
        arrays["weights"] = jnp.linspace(0, 2, 777)

    def ours(arrays, implementation=f"{algorithm}/{kernels}"):
        return memjax.linear_cross_entropy(
            **arrays, labels=labels, layout=layout, chunk=320, implementation=implementation, return_aux=True, **options
        )

    (value, aux), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(arrays)
    with jax.enable_x64(True):
        exact = to_float64(arrays)
        expected, expected_grads = jax.value_and_grad(
            lambda arrays: plain(**arrays, labels=labels, layout=layout, **options)
        )(exact)
        _, expected_aux = jax.jit(lambda arrays: ours(arrays, implementation="full"))(
            {k: v for k, v in exact.items() if k != "weights"}
        )
    assert relative_error(value, expected) < 1e-4
    for name, grad in grads.items():
        assert relative_error(grad, expected_grads[name]) < 4e-3, name
    np.testing.assert_allclose(aux.log_sum_exp, expected_aux.log_sum_exp, rtol=4e-3)  # of rounded logits
    np.testing.assert_allclose(aux.accuracy, expected_aux.accuracy, atol=5e-3)
    np.testing.assert_allclose(aux.entropy, expected_aux.entropy, rtol=1e-3)


@pytest.mark.parametrize("implementation", ["forward_grad", "recompute"])
@pytest.mark.parametrize("late", [200.0, -jnp.inf])
def test_rows_whose_largest_logits_come_late(implementation, late):
    """Sums relative to the first columns' maximum, which overflow, or which there is none of."""
    x, w, labels = example(0, 300, 256, 40000, dtype=jnp.bfloat16)
    bias = jnp.zeros((40000,)).at[30000:].set(abs(late) if late > 0 else 0.0)
    if late < 0:
        bias = bias.at[:20000].set(late)
        labels = jnp.where(labels >= 0, labels % 20000 + 20000, labels)
    bias = bias.astype(jnp.bfloat16)
    loss = jax.value_and_grad(
        lambda x, w, implementation: memjax.linear_cross_entropy(
            x, w, labels, bias=bias, implementation=implementation
        ),
        argnums=(0, 1),
    )
    actual = jax.jit(loss, static_argnums=2)(x, w, f"{implementation}/triton")
    expected = jax.jit(loss, static_argnums=2)(x, w, f"{implementation}/jnp")
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, e) < 2e-3


@pytest.mark.parametrize(
    ("algorithm", "kernels"), [("forward_grad", "triton"), ("recompute", "triton"), ("recompute", "mosaic")]
)
@pytest.mark.parametrize("bad", [jnp.nan, 1e38])
def test_tokens_that_do_not_count_may_hold_anything(algorithm, kernels, bad):
    """Ignored ones and those of weight zero: the value and the other gradients are as with ordinary numbers in their place."""
    if reason := missing(kernels):
        pytest.skip(reason)
    x, w, labels = example(0, 777, 320, 1088, dtype=jnp.bfloat16)
    labels = labels.at[3].set(-100).at[5].set(7)
    weights = jnp.linspace(0.5, 1.0, 777).at[5].set(0.0)

    def loss(x, w):
        return memjax.linear_cross_entropy(
            x, w, labels, weights=weights, chunk=320, z_loss=0.1, implementation=f"{algorithm}/{kernels}"
        )

    both = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, (dx, dw) = both(x.at[3].set(bad).at[5].set(-bad), w)
    expected, (expected_dx, expected_dw) = both(x, w)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert not np.any(np.asarray(dx, np.float32)[[3, 5]])
    assert relative_error(dx, expected_dx) < 1e-3
    assert relative_error(dw, expected_dw) < 1e-3
