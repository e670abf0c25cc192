"""Convolutions in the order that XLA:CPU runs fast in loops, beside those as they are written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from memjax._core.compat import bodies
from memjax._core.program.cpu_convolutions import convolution_for_loops, is_slow_in_loops
from memjax._core.program.dataflow import is_literal
from memjax._plan.batch.examples import batch_of
from memjax._plan.batch.microbatches import in_microbatches

DIMENSIONS = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("CHWN", "IHWO", "HWNC"), ("NWC", "WIO", "NWC")
OPTIONS = {
    "plain": {},
    "strides": {"window_strides": (2, 2)},
    "dilated": {"rhs_dilation": (2, 1), "padding": "VALID"},
    "padded": {"padding": ((2, 0), (1, 3))},
}
SIZES = {"N": 4, "C": 6, "H": 9, "W": 8, "O": 10, "I": 6}


def convolution(dimensions, options):
    """It, and arrays for it. Of one with one dimension of places the options are those of the last of two."""
    ndim = len(dimensions[0]) - 2
    options = {"window_strides": (1, 1), "padding": "SAME"} | options
    options = {name: value if isinstance(value, str) else value[2 - ndim :] for name, value in options.items()}
    keys = jax.random.split(jax.random.key(0))
    kernel = SIZES | {"H": 3, "W": 2}
    x = jax.random.normal(keys[0], [SIZES[dim] for dim in dimensions[0]])
    w = jax.random.normal(keys[1], [kernel[dim] for dim in dimensions[1]])
    return functools.partial(lax.conv_general_dilated, dimension_numbers=dimensions, **options), x, w


def convolutions_in(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            yield eqn
        for body in bodies(eqn):
            yield from convolutions_in(body)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dimensions", DIMENSIONS, ids="/".join)
def test_results_and_gradients_are_the_same(dimensions, option):
    f, x, w = convolution(dimensions, OPTIONS[option])
    loss = lambda x, w: jnp.sum(f(x, w) ** 2)
    for g in (f, jax.grad(loss), jax.grad(loss, 1)):
        closed = jax.make_jaxpr(g)(x, w)
        pairs = jax.jit(functools.partial(found_and_expected, closed.jaxpr))(x, w)
        assert pairs
        for found, expected in pairs:
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def found_and_expected(jaxpr, *args):
    """Results of the convolutions of a program, in the order for loops and as they are written."""
    env, pairs = dict(zip(jaxpr.invars, args, strict=True)), []
    for eqn in jaxpr.eqns:
        values = [atom.val if is_literal(atom) else env[atom] for atom in eqn.invars]
        outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        outs = list(outs) if eqn.primitive.multiple_results else [outs]
        if eqn.primitive.name == "conv_general_dilated":
            pairs.append((convolution_for_loops(eqn, *values), outs[0]))
            [changed] = convolutions_in(jax.make_jaxpr(functools.partial(convolution_for_loops, eqn))(*values).jaxpr)
            assert not is_slow_in_loops(changed)
        env |= zip(eqn.outvars, outs, strict=True)
    return pairs


def step(w, images, labels):
    def loss(w):
        h = jax.nn.relu(
            lax.conv_general_dilated(images, w[0], (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        )
        return optax.softmax_cross_entropy_with_integer_labels(h.mean((2, 3)) @ w[1], labels).mean()

    return jax.tree.map(jnp.subtract, w, jax.grad(loss)(w))


@pytest.mark.parametrize("platform", ["cpu", "gpu"], ids=["there", "elsewhere"])
def test_microbatches_have_none_that_is_slow_on_a_cpu(platform):
    keys = jax.random.split(jax.random.key(0), 2)
    w = jax.random.normal(keys[0], (8, 3, 3, 3)), jax.random.normal(keys[1], (8, 5))
    args = w, jnp.ones((8, 3, 6, 6)), jnp.arange(8) % 5
    closed = jax.make_jaxpr(step)(*args)
    parts = in_microbatches(closed, batch_of(closed), 4, platform)
    slow = [is_slow_in_loops(eqn) for eqn in convolutions_in(parts.jaxpr)]
    assert slow == [platform == "gpu"] * len(slow)
    assert len(slow) == 2
    found = jax.core.eval_jaxpr(parts.jaxpr, parts.consts, *jax.tree.leaves(args))
    for a, b in zip(found, jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_groups_of_features_stay_as_they_are():
    f = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME", feature_group_count=4)
    closed = jax.make_jaxpr(f)(jnp.ones((2, 4, 8)), jnp.ones((4, 1, 3)))
    assert [is_slow_in_loops(eqn) for eqn in convolutions_in(closed.jaxpr)] == [False]
