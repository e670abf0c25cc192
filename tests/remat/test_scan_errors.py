"""What `remat.scan` refuses, and what it says then."""

import re

import jax
import jax.numpy as jnp
import pytest

from memjax.remat import scan

XS = jnp.ones((40, 2))


def step(h, x):
    return jnp.sin(h * x), x


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of slots and budget, got slots=None and budget=None"),
        ({"slots": 3, "budget": 100}, "exactly one of slots and budget, got slots=3 and budget=100"),
        ({"slots": 0}, "slots must be a whole number of carries, at least 1, got 0"),
        ({"slots": 2.5}, "slots must be a whole number of carries, at least 1, got 2.5"),
        ({"slots": 3, "strategy": "both"}, "strategy must be one of hidden, internal, mixed, got 'both'"),
        ({"budget": -1}, "budget must not be negative, got -1"),
        ({"budget": "64 megs"}, 'budget must be bytes or a text like "64MiB"'),
        ({"budget": "xMiB"}, "got 'xMiB'"),
        ({"slots": 3, "length": 39}, "xs and length must agree on the number of steps, got xs: 40, length: 39"),
        ({"slots": 3, "length": -1}, "length"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        scan(step, jnp.ones(2), XS, **options)


def test_budget_below_the_least():
    with pytest.raises(ValueError, match=r"budget is 10 bytes, but the least possible is (\d+): .* 20.5 times") as info:
        scan(step, jnp.ones(2), XS, budget=10)
    least = int(re.search(r"possible is (\d+)", str(info.value))[1])
    jax.grad(lambda h: scan(step, h, XS, budget=least)[0].sum())(jnp.ones(2))  # it is enough
    with pytest.raises(ValueError, match="budget is"):
        scan(step, jnp.ones(2), XS, budget=least - 1)


def test_too_few_slots_for_the_length():
    with pytest.raises(
        ValueError, match="slots is 1, with which 100000 steps take 5000050000 forward steps; give more, 3"
    ):
        jax.grad(lambda h: scan(lambda h, _: (jnp.sin(h), None), h, length=100_000, slots=1)[0].sum())(jnp.ones(2))


@pytest.mark.parametrize(
    ("xs", "message"),
    [
        ({"a": jnp.ones(3), "b": jnp.ones(4)}, "must agree on the number of steps, got xs['a']: 3, xs['b']: 4"),
        ((jnp.ones(3), 1.0), "xs[1] has no axis to scan over: it is a scalar"),
        (None, "scan needs a length: xs has no arrays, and length is None"),
    ],
)
def test_xs(xs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        scan(lambda h, x: (h, None), jnp.ones(2), xs, slots=3)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (
            lambda h, x: ({"h": h["h"].astype(jnp.bfloat16)}, None),
            r"\['h'\] went in as float32\[2\] and came out as bfloat16\[2\]",
        ),
        (lambda h, x: ({"h": h["h"][None]}, None), r"\['h'\] went in as float32\[2\] and came out as float32\[1,2\]"),
        (lambda h, x: ((h["h"],), None), "f must return a carry of the structure it got"),
        (lambda h, x: h, "f must return a pair"),
    ],
)
def test_carry(f, message):
    with pytest.raises(TypeError, match=message):
        scan(f, {"h": jnp.ones(2)}, XS, slots=3)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_forward_mode(wrap):
    def total(h, xs):
        return scan(step, h, xs, slots=3)[0].sum()

    def cell_with(w):
        return scan(lambda h, x: (jnp.sin(h * w), None), jnp.ones(2), length=5, slots=3)[0]

    message = "cannot be differentiated in forward mode .* Use jax.lax.scan there"
    ones = jnp.ones(2)
    for run in (
        lambda: jax.jvp(total, (ones, XS), (ones, XS)),
        lambda: jax.jacfwd(total)(ones, XS),
        lambda: jax.linearize(total, ones, XS)[1](ones, XS),
        lambda: jax.jvp(cell_with, (ones,), (ones,)),
        lambda: jax.vmap(lambda t: jax.jvp(cell_with, (ones,), (t,))[1])(jnp.eye(2)),
    ):
        with pytest.raises(TypeError, match=message):
            wrap(run)()
