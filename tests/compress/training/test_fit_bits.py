"""Bits for each array: gradients are off by as much as `sigma` says, beside float64; choosing again; what is left alone."""

import contextlib
import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax.compress import ArrayBits, BitsController, FittedBits, PositionQuantized, fit_bits
from memjax.compress._training.array_bits import fewest_bits
from tests.compress.codecs.round_trip import normal
from tests.compress.kept import kept_bytes
from tests.compress.transformer_layers import inputs, layer, parameters

BITS = (8, 6, 4, 3)


def _square(squares, bits):
    return sum(s * (255 / (2**b - 1)) ** 2 for s, b in zip(squares, bits, strict=True))


def test_few_bits_are_the_best_of_all_choices():
    random = np.random.default_rng(0)
    of_all = lambda arrays: [BITS] * arrays
    for _ in range(200):
        squares, sizes = 10 ** random.uniform(-6, -3, 4), random.uniform(0.5, 2, 4)
        most = sum(squares) * 10 ** random.uniform(0, 3)
        bits = fewest_bits(squares, sizes, most, of_all(4))
        assert _square(squares, bits) <= most * (1 + 1e-9)
        allowed = [c for c in itertools.product(BITS, repeat=4) if _square(squares, c) <= most]
        assert np.dot(sizes, bits) == pytest.approx(min(np.dot(sizes, c) for c in allowed))
    squares, sizes = 10 ** random.uniform(-6, -3, 40), random.uniform(0.5, 2, 40)
    many = fewest_bits(squares, sizes, 30 * sum(squares), of_all(40))
    assert _square(squares, many) == pytest.approx(30 * sum(squares), rel=0.05)
    assert fewest_bits([1e-9] * 3, [1] * 3, 1.0, of_all(3)) == (3, 3, 3)
    assert fewest_bits([1.0] * 3, [1] * 3, 1e-3, of_all(3)) == (8, 8, 8)


def _gradient(bits, p, x):
    f = lambda p, x: jnp.mean(jnp.tanh(memjax.compressed(layer, bits=bits[0], inputs="x")(p, x)) ** 2)
    return jax.grad(f)(p, x)


@functools.cache
def _exact():
    """The gradient for `parameters()` and `inputs()` in float64."""
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (parameters(), inputs()))
    with jax.enable_x64(True):
        found = jax.jit(jax.grad(lambda p, x: jnp.mean(jnp.tanh(layer(p, x)) ** 2)))(*wide)
        return list(map(np.asarray, jax.tree.leaves(found)))


def _error(gradient):
    """The root mean square over arrays of relative errors beside the gradient in float64."""
    pairs = zip(jax.tree.leaves(gradient), _exact(), strict=True)
    return np.sqrt(np.mean([np.sum((np.asarray(a, np.float64) - b) ** 2) / np.sum(b**2) for a, b in pairs]))


def test_gradients_are_off_by_as_much_as_was_asked_for():
    p, x, sigma = parameters(), inputs(), 0.03
    fitted = fit_bits(_gradient, p, x, sigma=sigma, draws=1)
    assert 0.5 * sigma < fitted.sigma <= sigma
    assert _error(jax.jit(_gradient, static_argnums=0)(fitted.bits, p, x)) == pytest.approx(fitted.sigma, rel=0.15)
    assert FittedBits.from_json(fitted.to_json()) == fitted
    plain = kept_bytes(lambda p: jnp.mean(layer(p, x)), p)
    kept = lambda bits: kept_bytes(lambda p: jnp.mean(memjax.compressed(layer, bits=bits, inputs="x")(p, x)), p)
    assert kept(fitted.bits[0]) < 0.75 * plain
    assert kept(fitted.bits[0]) < kept(8)


def test_sigma_without_data_is_about_the_error():
    p, x = parameters(), inputs()
    before = 0
    for sigma in (0.01, 0.1):
        f = lambda p, s=sigma: jnp.mean(jnp.tanh(memjax.compressed(layer, sigma=s, inputs="x")(p, x)) ** 2)
        error = _error(jax.jit(jax.grad(f))(p))
        assert max(before, 0.2 * sigma) < error < 3 * sigma
        before = error


def test_parts_have_bits_of_their_own():
    w, x = normal(2, 2, 128, 128) / np.float32(128**0.5), normal(512, 128, seed=1)

    def gradient(bits, w, x):
        def loss(w):
            y = x
            for own, of_part in zip(w, bits, strict=True):
                f = lambda w, x: x + jax.nn.silu(x @ w[0]) @ w[1]
                y = (f if of_part is None else memjax.compressed(f, bits=of_part, inputs="x"))(own, y)
            return jnp.mean(jnp.tanh(y) ** 2)

        return jax.grad(loss)(list(w))

    exact = jax.jit(gradient, static_argnums=0)((None,) * 2, w, x)
    before = np.inf
    for sigma in (0.004, 0.1):
        fitted = fit_bits(gradient, w, x, sigma=sigma, parts=2, draws=1)
        assert fitted.sigma <= sigma
        found = jax.jit(gradient, static_argnums=0)(fitted.bits, w, x)
        errors = [
            np.sum(np.square(np.subtract(a, b))) / np.sum(np.square(b)) for a, b in zip(found, exact, strict=True)
        ]
        assert np.sqrt(np.mean(errors)) == pytest.approx(fitted.sigma, rel=0.2)
        bits = sum(sum(part.bits) for part in fitted.bits)
        assert bits < before
        before = bits


def _sums(bits, w, x):
    f = lambda w, x: x + jax.nn.silu(x @ w[0]) @ w[1]
    return jax.grad(lambda w: jnp.mean(jnp.tanh(memjax.compressed(f, bits=bits[0], inputs="x")(w, x)) ** 2))(w)


_sums_with = jax.jit(_sums, static_argnums=0)


def _weights():
    return jnp.asarray(normal(2, 64, 64) / 8), jnp.asarray(normal(256, 64, seed=1))


def test_choosing_again_compiles_few_steps():
    """Known bits stay while they do; after five there is one more, finer than each; then the best of what there is."""
    w, x = _weights()
    controller = BitsController(_sums, 0.03, every=10)
    first = controller.update(None, 0, w, x)
    assert controller.update(first, 9, w, x) is first
    again = controller.update(first, 10, w, x)
    assert (again.bits, again.known, again.step) == (first.bits, first.known, 10)
    [bits] = first.known
    coarse = tuple((3, *[b] * (len(bits) - 1)) for b in (3, 4, 5, 6, 8))
    finer = controller.update(dataclasses.replace(first, known=coarse, step=0), 20, w, x)
    assert len(finer.known) == 6
    assert all(a >= b for other in (*coarse, bits) for a, b in zip(finer.bits[0].bits, other, strict=True))
    assert finer.sigma <= 0.03
    six = tuple((3, *[b] * (len(bits) - 1)) for b in (3, 4, 5, 6, 8, 32))
    least = controller.update(dataclasses.replace(first, known=six), 10, w, x)
    assert least.known == six
    assert least.bits[0].bits in six
    moment = jax.tree.map(lambda g: 4 * g, _sums_with((8,), w, x))
    larger = controller.update(dataclasses.replace(first, known=()), 10, w, x, reference=moment)
    np.testing.assert_allclose(larger.alone, np.array(first.alone) / 4, rtol=1e-2)
    assert sum(larger.bits[0].bits) < sum(bits)
    with pytest.raises(ValueError, match="reference must be arrays of the shapes"):
        controller.update(None, 0, w, x, reference=moment[:1])


def test_each_array_has_its_own_bits():
    w, x = _weights()
    f = lambda x: jax.nn.silu(x @ w[0])
    saved = lambda bits: jax.tree.leaves(
        jax.eval_shape(lambda x: jax.vjp(memjax.compressed(lambda x: f(f(x)), bits=bits), x)[1], x)
    )
    size = lambda bits: sum(leaf.size * leaf.dtype.itemsize for leaf in saved(bits))
    code = lambda bits: PositionQuantized(bits).nbytes(x)
    assert size(ArrayBits(8, (8, 8))) == size(8)
    assert size(ArrayBits(8, (3, 5))) == size(8) - 2 * code(8) + code(3) + code(5)
    assert size(ArrayBits(8, (4, 32))) == size(8) - 2 * code(8) + code(4) + x.nbytes
    exact = jax.jit(jax.grad(lambda x: jnp.sum(f(f(x)))))(x)
    whole = jax.jit(jax.grad(lambda x: jnp.sum(memjax.compressed(lambda x: f(f(x)), bits=ArrayBits(8, (32, 32)))(x))))(
        x
    )
    np.testing.assert_allclose(whole, exact, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="bits must be those of the 2 arrays that are encoded, got bits of 1"):
        saved(ArrayBits(8, (4,)))
    with pytest.raises(ValueError, match="bits must be a tuple of the numbers"):
        ArrayBits(8, (7,))
    with pytest.raises(ValueError, match="base must be one of"):
        ArrayBits(5, ())
    with pytest.raises(ValueError, match="names must be 2 names"):
        ArrayBits(8, (8, 8), ("a",))


def test_what_saves_nothing_is_left_alone_and_said():
    """A layer of small arrays, an error below what 8 bits can do, and values near the largest."""
    w, _ = _weights()
    few = np.ones((2, 64), np.float32)
    fitted = fit_bits(_sums, w, few, sigma=0.01)
    assert fitted.bits[0].bits == ()
    assert "nothing is encoded" in repr(fitted.bits[0])
    assert fitted.sigma == 0
    np.testing.assert_allclose(_sums_with(fitted.bits, w, few), _sums_with((8,), w, few))
    _, x = _weights()
    tight = fit_bits(_sums, w, x, sigma=1e-6)
    assert set(tight.bits[0].bits) == {32}
    assert "as it is" in repr(tight.bits[0])
    assert "exact: in fewer bits gradients would be off by more than they may be" in str(
        memjax.explain(lambda w, x: jnp.sum(_wrapped(tight.bits[0])(w, x)), w, x)
    )
    huge = fit_bits(_sums, w, x * 1e30, sigma=0.01)
    assert np.isfinite(huge.sigma)
    assert np.isfinite(_sums_with(huge.bits, w, x * 1e30)).all()


def _wrapped(bits):
    return memjax.compressed(lambda w, x: x + jax.nn.silu(x @ w[0]) @ w[1], bits=bits, inputs="x")


def test_refuses():
    w, x = _weights()
    with pytest.raises(ValueError, match="sigma must be a positive finite number, got 0"):
        fit_bits(_sums, w, x, sigma=0)
    with pytest.raises(ValueError, match="parts must be an integer of at least 1"):
        fit_bits(_sums, w, x, sigma=0.1, parts=0)
    with pytest.raises(ValueError, match="gradient must be one that gives finite gradients"):
        fit_bits(_sums, w, x.at[0].set(jnp.nan), sigma=0.1)
    with pytest.raises(ValueError, match="sigma must be left out beside bits"):
        memjax.compressed(lambda x: x, bits=8, sigma=0.1)
    with pytest.raises(ValueError, match="sigma must be left out beside a codec"):
        memjax.compressed(lambda x: x, PositionQuantized(8), sigma=0.1)
    with pytest.raises(
        ValueError, match=r"gradient must use the bits of each part, got one that leaves out bits\[1\] of 2"
    ):
        fit_bits(lambda bits, w, x: _sums(bits[:1], w, x), w, x, sigma=0.1, parts=2)
    with pytest.raises(ValueError, match="reference must be finite arrays"):
        fit_bits(_sums, w, x, sigma=0.1, reference=jax.tree.map(lambda g: g * jnp.nan, _sums_with((8,), w, x)))
    with pytest.raises(ValueError, match="gradient must return floating-point arrays, got none"):
        fit_bits(lambda bits, w, x: (_sums(bits, w, x), None)[1], w, x, sigma=0.1)
    with pytest.raises(ValueError, match="reference must be arrays that are not all zero"):
        fit_bits(_sums, w, x, sigma=0.1, reference=jax.tree.map(jnp.zeros_like, _sums_with((8,), w, x)))
    with pytest.raises(ValueError, match="seed must be an integer of at most 32 bits"):
        fit_bits(_sums, w, x, sigma=0.1, seed=2**31)
    with pytest.raises(TypeError, match=r"args\[1\] must be a pytree of arrays and numbers, got 'x'"):
        fit_bits(_sums, w, "x", sigma=0.1)
    with pytest.raises(ValueError, match="bits must be a tuple of the numbers"):
        ArrayBits(8, (8.0,))
    both = lambda bits, w, x: (_sums(bits, w, x), _sums(bits, w, jnp.concatenate([x, x])))
    with pytest.raises(ValueError, match="gradient must not share bits between calls that encode different arrays"):
        fit_bits(both, w, x, sigma=0.1)


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint], ids=["alone", "checkpoint"])
def test_turns_of_a_scan_share_their_bits(around):
    """Errors of all turns add up, and the prediction knows."""
    w, x = normal(3, 2, 64, 64) / 8, _weights()[1]

    def gradient(bits, w, x):
        f = lambda w, x: x + jax.nn.silu(x @ w[0]) @ w[1]
        f = f if bits is None else around(memjax.compressed(f, bits=bits[0], inputs="x"))
        return jax.grad(lambda w: jnp.mean(jnp.tanh(jax.lax.scan(lambda x, w: (f(w, x), None), x, w)[0]) ** 2))(w)

    fitted = fit_bits(gradient, w, x, sigma=0.02)
    found = jax.jit(gradient, static_argnums=0)(fitted.bits, w, x)
    with jax.enable_x64(True):
        exact = np.asarray(jax.jit(gradient, static_argnums=0)(None, *(np.asarray(a, np.float64) for a in (w, x))))
    error = np.sqrt(np.sum((np.asarray(found, np.float64) - exact) ** 2) / np.sum(exact**2))
    assert fitted.sigma <= 0.02
    assert error == pytest.approx(fitted.sigma, rel=0.15)


def test_data_from_outside_is_checked():
    w, x = _weights()
    fitted = fit_bits(_sums, w, x, sigma=0.1)
    assert FittedBits.from_json(fitted.to_json()) == fitted
    good = json.loads(fitted.to_json())
    part = good["bits"][0]
    changes = [
        *({name: value} for name in good for value in (None, "x", -4, {}, [[9]], ["a"], 1.5j)),
        {"step": 1e9},
        {"sigma": float("nan")},
        {"alone": good["alone"][1:]},
        {"known": [part["bits"][1:]]},
        *({"bits": [part | {name: value}]} for name in part for value in (None, 7, "x", [7], {})),
        {"bits": [{"base": 8}]},
    ]
    for change in changes:
        with contextlib.suppress(TypeError):  # of what is no JSON
            text = json.dumps(good | change)
            with pytest.raises(ValueError, match=r"text must be what FittedBits\.to_json wrote"):
                FittedBits.from_json(text)
    with pytest.raises(ValueError, match=r"text must be what FittedBits\.to_json wrote"):
        FittedBits.from_json("{}")


def test_controller_of_other_arrays():
    """Bits are chosen anew where the gradient encodes other arrays."""
    w, x = [normal(64, 64, seed=i) / 8 for i in range(3)], normal(1024, 64, seed=9)

    def net(w, x):
        for one in w:
            x = jnp.tanh(x @ one)
        return x

    gradient = lambda bits, w, x: jax.grad(lambda w: jnp.mean(memjax.compressed(net, bits=bits[0])(w, x) ** 2))(w)
    controller = BitsController(gradient, 0.02, every=10)
    fitted = controller.update(None, 5, w, x)
    assert len(fitted.bits[0].bits) == len(w)
    assert controller.update(fitted, 14, w, x) is fitted
    for step in (6, 50):
        fewer = controller.update(fitted, step, w[:2], x)
        assert len(fewer.bits[0].bits) == 2
        assert fewer.step == step
        jax.eval_shape(lambda w, x, bits=fewer.bits: gradient(bits, w, x), w[:2], x)
    with pytest.raises(ValueError, match="step must be at least 5, that of `fitted`, got 4"):
        controller.update(fitted, 4, w, x)
    with pytest.raises(TypeError, match="fitted must be None or FittedBits, got"):
        controller.update(fitted.to_json(), 50, w, x)
