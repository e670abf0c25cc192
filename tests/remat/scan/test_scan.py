"""`remat.scan` against `jax.lax.scan` in double precision: values, gradients, and the whole contract."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from memjax.remat import scan
from tests.remat.scan.scan_cases import HIDDEN, LEAST, MIXED, WAYS, arguments, close, loss

pytestmark = pytest.mark.usefixtures("x64")


def gradient(scan, values, **options):
    return jax.jit(jax.value_and_grad(functools.partial(loss, scan, **options), argnums=(0, 1, 2)))(*values)


@functools.cache
def wanted(length, **options):
    return gradient(lax.scan, arguments(length), **options)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients(way):
    close(gradient(scan, arguments(23), **way), wanted(23))


@pytest.mark.parametrize(("way", "unroll"), [(HIDDEN, 2), (MIXED, 1), (MIXED, 0), (LEAST, 2)], ids=str)
def test_reverse_and_unroll(way, unroll):
    close(gradient(scan, arguments(13), unroll=unroll, reverse=True, **way), wanted(13, reverse=True))


def test_whiles_left_by_unroll():
    """As many loops, and as large a program, as with `jax.lax.scan` where steps simply follow each other."""

    def program(scan, differentiated, length=6, width=1, **options):
        run = lambda h: scan(lambda h, x: (jnp.sin(h * x), None), h, jnp.ones(length), None, **options)[0].sum()
        return jax.jit(jax.grad(run) if differentiated else run).lower(jnp.ones(width)).as_text("hlo")

    for unroll in (False, True, 0, 4, 6, 99):
        jaxs = program(lax.scan, False, unroll=unroll)
        for way in (MIXED, LEAST):
            ours = program(scan, False, unroll=unroll, **way)
            assert ours.count(" while(") == jaxs.count(" while(")
            assert ours.count(" call(") == jaxs.count(" call(")
    loops = [program(scan, True, unroll=unroll, budget="1MiB").count(" while(") for unroll in (1, 4, True)]
    assert loops == [2, 2, 0]  # all is kept: a loop forward and one back
    blocks = [program(scan, True, 20, 512, unroll=unroll, budget="28KiB") for unroll in (1, True)]
    assert blocks[1].count(" while(") < blocks[0].count(" while(")
    slots = [program(scan, True, unroll=unroll, slots=3, strategy="hidden") for unroll in (1, True)]
    assert slots[1].count(" while(") == slots[0].count(" while(") - 1  # the forward pass


@pytest.mark.parametrize(
    ("way", "length"),
    [*((MIXED, length) for length in (0, 1, 2, 5)), *((LEAST, length) for length in (0, 1, 3))],
    ids=str,
)
def test_short(way, length):
    close(gradient(scan, arguments(length), **way), wanted(length))


def nested_in_itself(scan, **way):
    params, h, xs = arguments(6)

    def outer(h, x):
        def inner(h, x):
            return jnp.tanh(h @ params["w"] + x), h.sum()

        return scan(inner, h, jnp.stack([x, 2 * x, x / 2, -x, x]), **way)

    def total(h, xs):
        h, ys = scan(outer, h, xs, **way)
        return (h**2).sum() + (ys**2).sum()

    return jax.jit(jax.grad(total, (0, 1)))(h, xs)


def dropout(scan, **way):
    """A typed key in the carry, and keys as xs: recomputed steps draw the same masks."""
    params, h, xs = arguments(11)

    def cell(carry, x):
        h, key = carry
        key, here = jax.random.split(key)
        masks = jax.random.bernoulli(here, 0.7, h.shape) & jax.random.bernoulli(x["key"], 0.7, h.shape)
        return (jnp.tanh(h @ params["w"] + x["x"]) * masks.astype(h.dtype), key), h[0]

    def total(h, xs):
        rows = {"x": xs, "key": jax.random.split(jax.random.key(5), 11)}
        (h, key), ys = scan(cell, (h, jax.random.key(3)), rows, **way)
        return (h**2).sum() + (ys**3).sum() + jax.random.uniform(key, dtype=h.dtype)

    return jax.jit(jax.value_and_grad(total, (0, 1)))(h, xs)


def many_types(scan, **way):
    """bfloat16, double, complex, integer and boolean leaves, of which slots are no multiples of each other."""
    _, h, xs = arguments(11)

    def cell(carry, x):
        low, high, z, n, even = carry
        low = jnp.tanh(low * x.astype(low.dtype) + jnp.where(even, 1, 0).astype(low.dtype))
        high = 0.9 * high + low.astype(high.dtype) * jnp.where(low > 0, x, 1.0)
        z = z * jnp.exp(lax.complex(0.0 * high[0], high[0]))
        return (low, high, z, n + 1, ~even), jnp.abs(z + 1.0)

    def total(low, high, xs):
        carry = (low, high, jnp.ones(3, jnp.complex128), 0, jnp.array([True, False, True]))
        (low, high, *_), ys = scan(cell, carry, xs, **way)
        return (low.astype(high.dtype) ** 2).sum() + (high**2).sum() + (ys**2).sum()

    return jax.jit(jax.grad(total, (0, 1, 2)))(h.astype(jnp.bfloat16), h, xs)


def without_xs_or_ys(scan, **way):
    """The carry alone; a length, no xs, no ys, and a Python number that takes the step's type."""
    params, h, _ = arguments(1)

    def total(params, h):
        carry, ys = scan(
            lambda c, _: ((jnp.tanh(c[0] @ params["w"]) * c[1], c[1] * 0.99), None), (h, 1.0), length=9, **way
        )
        assert ys is None
        return (carry[0] ** 2).sum() * carry[1]

    return jax.jit(jax.grad(total, (0, 1)))(params, h)


def only_ys(scan, **way):
    """No carry at all, and outputs without gradients beside ones with them."""
    params, _, xs = arguments(9)

    def total(params, xs):
        _, (ys, _) = scan(lambda _, x: (None, (jnp.tanh(x @ params["w"]), x.shape[0])), None, xs, **way)
        return (ys**2).sum()

    return jax.jit(jax.grad(total, (0, 1)))(params, xs)


def eager(scan, **way):
    return jax.grad(functools.partial(loss, scan, **way), (0, 1, 2))(*arguments(5))


@pytest.mark.parametrize(
    ("case", "way"),
    [*((case, MIXED) for case in (nested_in_itself, dropout, many_types, without_xs_or_ys, only_ys, eager)),
     (many_types, LEAST), (only_ys, LEAST)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)  # fmt: skip
def test_contract(case, way):
    close(case(scan, **way), plainly(case))


@functools.cache
def plainly(case):
    return case(lax.scan)
