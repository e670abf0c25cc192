"""Every option of both algorithms and of the reference against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memjax
from tests.linear_cross_entropy.oracle import IGNORED, example, grad, plain, relative_error, to_float64, value_and_grad

IMPLEMENTATIONS = ("full", "forward_grad/jnp", "recompute/jnp")
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

    (_, values), grads = jax.jit(jax.value_and_grad(scalar, has_aux=True))(arrays)
    return values, grads


@settings(max_examples=25, deadline=None, derandomize=True)
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
        keys = jax.random.split(jax.random.key(1), 3)
        arrays = {"x": x, "w": w}
        if with_bias:
            arrays["bias"] = jax.random.normal(keys[0], (classes,), jnp.float32).astype(dtype)
        if with_weights:
            arrays["weights"] = jax.random.uniform(keys[1], (tokens,), jnp.float32)
        if soft:
            labels = jax.random.uniform(keys[2], (tokens, classes), jnp.float32)

        def loss(x, w, labels, **arrays):
            return memjax.linear_cross_entropy(
                x, w, labels, implementation=implementation, chunk=chunk, **arrays, **options
            )

        expected, expected_grads = value_and_grads(
            lambda **arrays: plain(**arrays, **options), to_float64(arrays), labels
        )
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


@pytest.mark.parametrize("implementation", ["forward_grad", "recompute"])
@pytest.mark.parametrize("layout", ["vd", "dv"])
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
    x, w, labels = example(0, 10, 8, 24)
    padded = jnp.concatenate([jnp.zeros((8, 8)), w, jnp.zeros((16, 8))])
    bias = jnp.full((48,), -jnp.inf).at[8:32].set(0.0)
    shifted = jnp.where(labels == IGNORED, IGNORED, labels + 8)

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
    expected = memjax.linear_cross_entropy(x, w, labels, reduction="none")
    small = jnp.where(labels == IGNORED, -100, labels).astype(jnp.int8).reshape(2, 3, 4)
    actual = memjax.linear_cross_entropy(x.reshape(2, 3, 4, 8), w, small, reduction="none")
    np.testing.assert_array_equal(actual, expected.reshape(2, 3, 4))
    unsigned = jnp.where(labels == IGNORED, 200, labels).astype(jnp.uint8)
    actual = memjax.linear_cross_entropy(x, w, unsigned, reduction="none", ignore_index=200)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("soft", [False, True])
def test_aux(implementation, soft):
    x, w, labels = example(5, 40, 8, 33)
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    valid = np.ones(40, bool) if soft else np.asarray(labels) != IGNORED
    best = np.asarray(labels)
    given_labels = labels
    if soft:
        given_labels = jax.random.uniform(jax.random.key(0), (40, 33))
        best = np.asarray(given_labels).argmax(-1)
    # Make some predictions right.
    right = np.arange(40) % 3 == 0
    x = x + jnp.where(right[:, None], 3.0 * w[np.clip(best, 0, None)], 0.0)
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    lse = np.log(np.exp(z).sum(-1))
    p = np.exp(z - lse[:, None])
    loss, aux = memjax.linear_cross_entropy(x, w, given_labels, return_aux=True, implementation=implementation, chunk=7)
    (again, grad_aux), _ = value_and_grad(
        lambda x: memjax.linear_cross_entropy(
            x, w, given_labels, return_aux=True, implementation=implementation, chunk=7
        ),
        has_aux=True,
    )(x)
    np.testing.assert_allclose(loss, again, rtol=1e-6)
    for reported in (aux, grad_aux):
        np.testing.assert_allclose(reported.log_sum_exp, lse, rtol=1e-5)
        assert reported.valid_count == valid.sum()
        np.testing.assert_allclose(reported.accuracy, (z.argmax(-1) == best)[valid].mean(), rtol=1e-6)
        np.testing.assert_allclose(reported.entropy, -(p * np.log(p)).sum(-1)[valid].mean(), rtol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sign", [jnp.nan, 1e38])
def test_tokens_that_do_not_count_may_hold_anything(implementation, reduction, sign):
    """Ignored ones and those of weight zero: the values, the other gradients and weights' are as with zeros in their place."""
    if reduction == "none" and implementation.startswith("forward_grad"):
        implementation = "recompute/jnp"
    x, w, labels = example(0, 14, 8, 33)
    labels = labels.at[3].set(IGNORED).at[5].set(7)
    weights = jnp.linspace(0.5, 1.0, 14).at[5].set(0.0)
    bias = jnp.linspace(0.0, 120.0, 33)  # a softmax of zeros in place of the logits would overflow
    bad = x.at[3].set(sign).at[5].set(-sign)

    def loss(x, w, bias):
        return memjax.linear_cross_entropy(
            x,
            w,
            labels,
            bias=bias,
            weights=weights,
            implementation=implementation,
            reduction=reduction,
            chunk=5,
            z_loss=0.1,
        ).sum()

    value, grads = value_and_grad(loss, (0, 1, 2))(bad, w, bias)
    expected, expected_grads = value_and_grad(loss, (0, 1, 2))(x, w, bias)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert not np.any(np.asarray(grads[0])[[3, 5]])
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_weight_of_zero_has_a_derivative(implementation):
    """That of a sum is the token's loss."""
    x, w, labels = example(0, 14, 8, 33, ignored=0.0)
    weights = jnp.ones(14).at[5].set(0.0)
    loss = lambda weights, **options: memjax.linear_cross_entropy(x, w, labels, weights=weights, chunk=5, **options)
    slope = grad(lambda weights: loss(weights, reduction="sum", implementation=implementation))(weights)
    np.testing.assert_allclose(slope, loss(jnp.ones(14), reduction="none"), rtol=1e-5)


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("reduction", "smoothing"), [("mean", 0.0), ("mean", 0.3), ("sum", 0.3), ("none", 0.3)])
@pytest.mark.parametrize("soft", [False, True])
def test_class_weights_are_torchs(x64, implementation, reduction, smoothing, soft):
    if reduction == "none" and implementation.startswith("forward_grad"):
        implementation = "recompute/jnp"
    x, w, labels = example(0, 14, 8, 33, dtype=jnp.float64)
    if soft:
        labels = jax.nn.softmax(jax.random.normal(jax.random.key(3), (14, 33), jnp.float64))
    class_weights = jnp.linspace(0.0, 3.0, 33)
    ours = lambda x, w: memjax.linear_cross_entropy(
        x, w, labels, class_weights=class_weights, label_smoothing=smoothing, reduction=reduction,
        implementation=implementation, chunk=5,
    )  # fmt: skip
    theirs = lambda x, w: torch_cross_entropy(x, w, labels, class_weights, smoothing, reduction)
    np.testing.assert_allclose(ours(x, w), theirs(x, w), rtol=1e-12)
    slopes = lambda f: grad(lambda x, w: jnp.cos(f(x, w)).sum(), (0, 1))(x, w)
    for got, want in zip(slopes(ours), slopes(theirs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
