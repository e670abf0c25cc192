"""Every option of both algorithms and of the reference against the float64 oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memjax
from tests.linear_cross_entropy.oracle import IGNORED, example, grad, plain, relative_error, to_float64, value_and_grad

IMPLEMENTATIONS = ("full", "forward_grad/jnp", "recompute/jnp")
REDUCTIONS = ("mean", "sum", "none")
NONE_SUCH = [("forward_grad/jnp", "none")]
TOLERANCE = {jnp.float64: 1e-12, jnp.float32: 1e-6, jnp.bfloat16: 2e-2, jnp.float16: 2e-3}

options = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(["vd", "dv"]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "z_loss": st.sampled_from([0.0, 1e-2]),
        "softcap": st.sampled_from([None, 2.5]),
        "logit_scale": st.sampled_from([1.0, 0.6]),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
    }
)


def value_and_grads(loss, arrays, labels):
    """Value, and gradients of a combination of the losses with unequal cotangents."""

    def scalar(arrays):
        values = loss(labels=labels, **arrays)
        return (values * jnp.cos(jnp.arange(values.size, dtype=values.dtype)).reshape(values.shape)).sum(), values

    (_, values), grads = value_and_grad(scalar, has_aux=True)(arrays)
    return values, grads


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    implementation=st.sampled_from(IMPLEMENTATIONS),
    tokens=st.sampled_from([1, 7, 13, 32]),
    classes=st.sampled_from([1, 2, 31, 64, 97]),
    chunk=st.sampled_from([None, 1, 5, 16, 31, 1000]),
    dtype=st.sampled_from([jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16]),
    options=options,
    soft=st.booleans(),
    with_bias=st.booleans(),
    with_weights=st.booleans(),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_values_and_gradients(
    implementation, tokens, classes, chunk, dtype, options, soft, with_bias, with_weights, ignored
):
    if options["reduction"] == "none" and implementation.startswith("forward_grad"):
        implementation = "recompute/jnp"
    if chunk == 1:
        tokens, classes = min(tokens, 7), min(classes, 31)
    with jax.enable_x64(True):
        x, w, labels = example(0, tokens, 12, classes, dtype=dtype, layout=options["layout"], ignored=ignored)
        rng = np.random.default_rng(1)
        arrays = {"x": x, "w": w}
        if with_bias:
            arrays["bias"] = jnp.asarray(rng.normal(size=classes).astype(np.float32).astype(dtype))
        if with_weights:
            arrays["weights"] = jnp.asarray(rng.random(tokens, np.float32))
        if soft:
            labels = jnp.asarray(rng.random((tokens, classes), np.float32))

        def loss(x, w, labels, **arrays):
            return memjax.linear_cross_entropy(
                x, w, labels, implementation=implementation, chunk=chunk, **arrays, **options
            )

        wide = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
        expected, expected_grads = value_and_grads(lambda **arrays: plain(**arrays, **options), wide, labels)
        actual, grads = value_and_grads(loss, arrays, labels)
        assert actual.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), grads) == jax.tree.map(lambda a: (a.shape, a.dtype), arrays)
        tolerance = TOLERANCE[dtype]
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
        for name, grad in grads.items():
            difference = np.asarray(grad, np.float64) - np.asarray(expected_grads[name])
            norm = np.linalg.norm(expected_grads[name])
            tolerance = max(TOLERANCE[dtype], 1e-12 if grad.dtype == jnp.float64 else 1e-6)
            # Below one, cancellation (a single class, a uniform target) leaves rounding of the terms.
            floor = tolerance if dtype in (jnp.float64, jnp.float32) else 4 * tolerance
            assert np.linalg.norm(difference) <= 4 * tolerance * norm + floor * np.sqrt(tokens), name


@pytest.mark.parametrize(("implementation", "layout"), [("forward_grad", "vd"), ("recompute", "dv")])
def test_matches_the_plain_loss(implementation, layout):
    x, w, labels = example(3, 50, 24, 130, layout=layout)
    grads = grad(
        lambda x, w: memjax.linear_cross_entropy(x, w, labels, layout=layout, implementation=implementation, chunk=16),
        argnums=(0, 1),
    )(x, w)
    with jax.enable_x64(True):
        expected = grad(lambda x, w: plain(x, w, labels, layout=layout), argnums=(0, 1))(*to_float64((x, w)))
    for actual, oracle in zip(grads, expected, strict=True):
        assert relative_error(actual, oracle) < 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_all_tokens_ignored(implementation):
    x, w, labels = example(0, 9, 8, 33, ignored=1.0)
    value, grads = value_and_grad(
        lambda x, w: memjax.linear_cross_entropy(
            x, w, labels, implementation=implementation, chunk=4, z_loss=0.1, label_smoothing=0.1
        ),
        argnums=(0, 1),
    )(x, w)
    assert value == 0
    assert all(not np.any(np.asarray(g)) for g in grads)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens(implementation):
    x, w, labels = example(0, 0, 8, 33)
    value, dw = value_and_grad(lambda w: memjax.linear_cross_entropy(x, w, labels, implementation=implementation))(w)
    assert value == 0
    assert not np.any(np.asarray(dw))


@pytest.mark.parametrize("implementation", ["forward_grad", "recompute"])
def test_impossible_entries(implementation):
    """A bias of minus infinity takes padding of the vocabulary out, even where it fills whole chunks."""
    x, w, labels = map(np.asarray, example(0, 10, 8, 24))
    padded = np.pad(w, ((8, 16), (0, 0)))
    bias = np.full(48, -np.inf, np.float32)
    bias[8:32] = 0
    shifted = np.where(labels == IGNORED, IGNORED, labels + 8)

    def loss(x, w, labels, bias=None):
        return memjax.linear_cross_entropy(x, w, labels, bias=bias, implementation=implementation, chunk=8)

    expected, expected_dx = value_and_grad(loss)(x, w, labels)
    actual, (dx, dw) = value_and_grad(loss, argnums=(0, 1))(x, padded, shifted, bias)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-5, atol=1e-7)
    assert not np.any(np.asarray(dw[:8]))
    assert not np.any(np.asarray(dw[32:]))


def test_leading_dimensions_and_integer_dtypes():
    x, w, labels = example(0, 24, 8, 33)
    losses = jax.jit(partial(memjax.linear_cross_entropy, reduction="none"), static_argnames="ignore_index")
    expected = np.asarray(losses(x, w, labels))
    x, labels = map(np.asarray, (x, labels))
    small = labels.astype(np.int8).reshape(2, 3, 4)
    actual = losses(x.reshape(2, 3, 4, 8), w, small)
    np.testing.assert_array_equal(actual, expected.reshape(2, 3, 4))
    unsigned = np.where(labels == IGNORED, 200, labels).astype(np.uint8)
    actual = losses(x, w, unsigned, ignore_index=200)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("implementation", "soft"), [("full", False), ("forward_grad/jnp", True), ("recompute/jnp", False)]
)
def test_aux(implementation, soft):
    x, w, labels = map(np.asarray, example(5, 40, 8, 33))
    valid = np.ones(40, bool) if soft else labels != IGNORED
    given_labels = np.random.default_rng(0).random((40, 33), np.float32) if soft else labels
    best = given_labels.argmax(-1) if soft else labels
    # Make some predictions right.
    right = np.arange(40) % 3 == 0
    x = x + np.where(right[:, None], np.float32(3) * w[np.clip(best, 0, None)], np.float32(0))
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    lse = np.log(np.exp(z).sum(-1))
    p = np.exp(z - lse[:, None])
    f = lambda x: memjax.linear_cross_entropy(
        x, w, given_labels, return_aux=True, implementation=implementation, chunk=7
    )
    (loss, aux), ((again, grad_aux), _) = jax.jit(lambda x: (f(x), jax.value_and_grad(f, has_aux=True)(x)))(x)
    np.testing.assert_allclose(loss, again, rtol=1e-6)
    for reported in (aux, grad_aux):
        np.testing.assert_allclose(reported.log_sum_exp, lse, rtol=1e-5)
        assert reported.valid_count == valid.sum()
        np.testing.assert_allclose(reported.accuracy, (z.argmax(-1) == best)[valid].mean(), rtol=1e-6)
        np.testing.assert_allclose(reported.entropy, -(p * np.log(p)).sum(-1)[valid].mean(), rtol=1e-4)


@pytest.mark.parametrize(
    ("implementation", "reduction"),
    [(name, reduction) for name in IMPLEMENTATIONS for reduction in REDUCTIONS if (name, reduction) not in NONE_SUCH],
)
def test_tokens_that_do_not_count_may_hold_anything(implementation, reduction):
    """Ignored ones and those of weight zero: the values, the other gradients and weights' are as with zeros in their place."""
    x, w, labels = map(np.array, example(0, 14, 8, 33))
    labels[3], labels[5] = IGNORED, 7
    weights = np.linspace(0.5, 1.0, 14, dtype=np.float32)
    weights[5] = 0
    bias = np.linspace(0.0, 120.0, 33, dtype=np.float32)  # a softmax of zeros in place of the logits would overflow

    @jax.jit
    def value_and_grads(x):
        loss = lambda *arrays: memjax.linear_cross_entropy(
            *arrays[:2], labels, bias=arrays[2], weights=weights, implementation=implementation, reduction=reduction,
            chunk=5, z_loss=0.1,
        ).sum()  # fmt: skip
        return jax.value_and_grad(loss, (0, 1, 2))(x, w, bias)

    expected, expected_grads = value_and_grads(x)
    for sign in (np.nan, 1e38):
        x[3], x[5] = sign, -sign
        value, grads = value_and_grads(x)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        assert not np.any(np.asarray(grads[0])[[3, 5]])
        for got, want in zip(grads, expected_grads, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_weight_of_zero_has_a_derivative(implementation):
    """That of a sum is the token's loss."""
    x, w, labels = example(0, 14, 8, 33, ignored=0.0)
    ones = np.ones(14, np.float32)
    loss = lambda weights, **options: memjax.linear_cross_entropy(x, w, labels, weights=weights, chunk=5, **options)
    slope = grad(lambda weights: loss(weights, reduction="sum", implementation=implementation))
    losses = jax.jit(lambda weights: loss(weights, reduction="none"))(ones)
    np.testing.assert_allclose(slope(np.where(np.arange(14) == 5, 0, ones)), losses, rtol=1e-5)


def torch_cross_entropy(x, w, labels, class_weights, smoothing, reduction):
    """`torch.nn.functional.cross_entropy(x @ w.T, labels, weight=, label_smoothing=)` as its documentation has it: a part for
    the label and one for all classes, each with the weights of its classes; the mean divides by the weights of the labels."""
    log_p = jax.nn.log_softmax(x @ w.T)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        targets = labels * (1 - smoothing) + smoothing / log_p.shape[1]
        losses = -(class_weights * targets * log_p).sum(-1)
        return {"none": losses, "sum": losses.sum(), "mean": losses.mean()}[reduction]
    valid = labels != IGNORED
    label = jnp.where(valid, labels, 0)
    of_label = -class_weights[label] * jnp.take_along_axis(log_p, label[:, None], 1)[:, 0]
    of_all = -(class_weights * log_p).sum(-1) / log_p.shape[1]
    losses = jnp.where(valid, (1 - smoothing) * of_label + smoothing * of_all, 0.0)
    divisor = jnp.where(valid, class_weights[label], 0.0).sum()
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / divisor}[reduction]


@pytest.mark.parametrize(
    ("implementation", "reduction", "smoothing", "soft"),
    [
        ("full", "mean", 0.0, False),
        ("full", "none", 0.3, True),
        ("forward_grad/jnp", "mean", 0.3, False),
        ("forward_grad/jnp", "sum", 0.3, True),
        ("recompute/jnp", "mean", 0.3, True),
        ("recompute/jnp", "sum", 0.0, False),
        ("recompute/jnp", "none", 0.3, False),
    ],
)
def test_class_weights_are_torchs(x64, implementation, reduction, smoothing, soft):
    x, w, labels = example(0, 14, 8, 33, dtype=jnp.float64)
    if soft:
        labels = np.random.default_rng(3).dirichlet(np.ones(33), 14)
    class_weights = jnp.linspace(0.0, 3.0, 33)
    ours = lambda x, w: memjax.linear_cross_entropy(
        x, w, labels, class_weights=class_weights, label_smoothing=smoothing, reduction=reduction,
        implementation=implementation, chunk=5,
    )  # fmt: skip
    theirs = lambda x, w: torch_cross_entropy(x, w, labels, class_weights, smoothing, reduction)

    @jax.jit
    def both(x, w):
        cos = lambda f: lambda x, w: jnp.cos(f(x, w)).sum()
        return [(f(x, w), jax.grad(cos(f), (0, 1))(x, w)) for f in (ours, theirs)]

    (value, slopes), (expected, expected_slopes) = both(x, w)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for got, want in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
