"""`remat.scan` differentiated again, in float64."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from memjax.remat import scan
from tests.remat.scan.scan_cases import LEAST, MIXED, arguments, close, loss

pytestmark = pytest.mark.usefixtures("x64")


def gradient_of_gradient(run):
    def of_gradient(*values):
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(jax.grad(run, (0, 1, 2))(*values)))

    return jax.jit(jax.grad(of_gradient, (0, 1, 2)))(*arguments(7))


def third_derivative(run):
    params, h, xs = arguments(5)

    def again(function):
        return lambda h: jnp.sin(jax.grad(function)(h)).sum()

    return jax.jit(jax.grad(again(again(lambda h: run(params, h, xs)))))(h)


def forward_over_reverse(run):
    return jax.jit(jax.jacfwd(jax.jit(jax.grad(run, 1)), 1))(*arguments(7))


@pytest.mark.parametrize(
    ("transform", "way"),
    [
        (gradient_of_gradient, MIXED),
        (gradient_of_gradient, LEAST),
        (third_derivative, MIXED),
        (forward_over_reverse, LEAST),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_transforms(transform, way):
    close(transform(functools.partial(loss, scan, **way)), transform(functools.partial(loss, lax.scan)))
