"""What masks and max pools need in the backward pass: bits, and a byte for each window, both exact."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import memjax

pytestmark = pytest.mark.usefixtures("x64")
BATCH, SIZE, WIDTH = 4, 24, 16


def normal(seed, *shape, scale=1.0, dtype=jnp.float32):
    """Normal numbers. NumPy draws them, so that nothing is compiled."""
    return jax.device_put(np.asarray(scale * np.random.default_rng(seed).normal(size=shape), dtype))


def parameters(dtype=jnp.float32, layers=2):
    return [normal(seed, 3, 3, WIDTH, WIDTH, scale=0.2, dtype=dtype) for seed in range(layers)]


def images(dtype=jnp.float32):
    return normal(9, BATCH, SIZE, SIZE, WIDTH, dtype=dtype)


def convolved(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def windows(size, stride, padding):
    """A pool of one example by `lax.reduce_window`, as equinox writes it."""
    one = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (size, size, 1), (stride, stride, 1), padding)
    return jax.vmap(one)


POOLS = {
    "linen": lambda x: nn.max_pool(x, (2, 2), strides=(2, 2)),
    "nnx, overlapping": lambda x: nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1))),
    "of one example": windows(3, 1, ((0, 2), (1, 1), (0, 0))),
}


def loss_with(pool):
    def loss(params, x):
        for kernel in params:
            x = pool(jax.nn.relu(convolved(x, kernel)))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return loss


def program(f, *args):
    return jax.jit(jax.value_and_grad(f), compiler_options=dict(memjax.remat_compiler_options())).lower(*args).compile()


def temp_nbytes(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def kept(plan):
    return [one for stretch in plan.stretches for one in stretch.kept]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float64") for name in POOLS), ("nnx, overlapping", "bfloat16")], ids=str
)
def test_gradients_of_pools_are_those_of_the_network(name, dtype):
    loss, args = loss_with(POOLS[name]), (parameters(dtype), images(dtype))
    plain = program(loss, *args)
    plan = memjax.plan(loss, *args, budget=temp_nbytes(plain) // 2)
    assert any("max_pool_index" in one.what for one in kept(plan))
    found, wanted = (f(*args) for f in (program(memjax.planned(loss, plan=plan), *args), plain))
    # Where windows overlap, cotangents are added in another order; and of bfloat16 in float32 here.
    off = 1e-12 if dtype == "float64" else 0.02
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, atol=off * np.abs(other).max(), rtol=0)


def test_pools_take_a_fraction_of_the_memory_that_xla_takes_for_them():
    """XLA:CPU makes an index in each dimension for each value: five times the input."""
    loss, args = loss_with(POOLS["linen"]), (parameters(), images())
    plan = memjax.plan(loss, *args, budget="min")
    plain = program(loss, *args).memory_analysis().temp_size_in_bytes
    assert plan.nbytes < 0.35 * plain
    assert plan.nbytes == pytest.approx(plan.first_nbytes, rel=0.1)
    compiled = program(memjax.planned(loss, plan=plan), *args)
    assert "select-and-scatter" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes <= plan.nbytes


def test_a_second_derivative_through_a_pool():
    loss = loss_with(POOLS["nnx, overlapping"])
    args = parameters("float64", 1), images("float64")
    plan = memjax.plan(loss, *args, budget=temp_nbytes(program(loss, *args)) // 2)
    assert plan.stretches
    squares = lambda f: lambda params: sum(jnp.sum(g**2) for g in jax.grad(f)(params, args[1]))
    found, wanted = (jax.jit(jax.grad(squares(f)))(args[0]) for f in (memjax.planned(loss, plan=plan), loss))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-9, atol=1e-12)


def test_a_pool_in_a_loop():
    pool = windows(3, 1, ((1, 1), (1, 1), (0, 0)))

    def loss(params, x):
        x, _ = lax.scan(lambda x, kernel: (pool(jnp.tanh(convolved(x, kernel))), None), x, params)
        return jnp.mean(x**2)

    args = jnp.stack(parameters("float64", 3)), images("float64")
    plain = program(loss, *args)
    plan = memjax.plan(loss, *args, budget=int(0.6 * temp_nbytes(plain)))
    assert any("max_pool_index" in one.what for one in kept(plan))
    found = program(memjax.planned(loss, plan=plan), *args)(*args)
    np.testing.assert_allclose(found[1], plain(*args)[1], rtol=1e-10, atol=1e-14)


def test_a_training_step_with_a_pool_holds_less():
    loss, args = loss_with(POOLS["linen"]), (parameters(), images())
    step = jax.value_and_grad(loss)
    plain = program(loss, *args).memory_analysis()
    beside = plain.argument_size_in_bytes + plain.output_size_in_bytes
    planned = memjax.jit(step, budget=beside + plain.temp_size_in_bytes // 2, allow=("recompute",))
    found, wanted = planned(*args), jax.jit(step)(*args)
    np.testing.assert_allclose(found[1][0], wanted[1][0], rtol=1e-5, atol=1e-7)


# Masks.

ROWS, HIDDEN, LAYERS = 1024, 128, 3


def layers(dtype=jnp.float32):
    return [normal(seed, HIDDEN, HIDDEN, scale=0.1, dtype=dtype) for seed in range(LAYERS)]


def rows(dtype=jnp.float32):
    return normal(9, ROWS, HIDDEN, dtype=dtype)


def dropped(x, i):
    kept = jax.random.bernoulli(jax.random.key(i), 0.9, x.shape)
    return jnp.where(kept, x / 0.9, 0)


ACTIVATIONS = {
    "leaky": lambda x, i: jax.nn.leaky_relu(x),
    "dropout": lambda x, i: dropped(jnp.tanh(x), i),
    "where": lambda x, i: jnp.where(x > 0.3, x, -0.1 * x),
}


def dense_with(activation):
    def loss(params, x):
        for i, w in enumerate(params):
            x = x + jnp.tanh(activation(x @ w, i) @ w.T)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return loss


def with_bits(loss, *args):
    """A plan that keeps masks as bits: of several budgets the first that does."""
    plain = temp_nbytes(program(loss, *args))
    for share in (0.8, 0.6, 0.5):
        plan = memjax.plan(loss, *args, budget=int(share * plain))
        if any(one.bits == 1 for one in kept(plan)):
            return plan
    raise AssertionError("no plan keeps a mask as bits")


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in ACTIVATIONS), ("where", "bfloat16")], ids=str
)
def test_masks_as_bits_change_no_gradient(name, dtype):
    loss, args = dense_with(ACTIVATIONS[name]), (layers(dtype), rows(dtype))
    plan = with_bits(loss, *args)
    masks = [one for one in kept(plan) if one.bits == 1]
    assert all(one.nbytes == ROWS * HIDDEN // 8 for one in masks)
    assert "as bits" in str(plan)
    assert memjax.Plan.from_json(plan.to_json()) == plan
    found, wanted = (program(f, *args)(*args)[1] for f in (memjax.planned(loss, plan=plan), loss))
    for one, other in zip(found, wanted, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, atol=(1e-6 if dtype == "float32" else 0.02) * np.abs(other).max())


def test_masks_as_bits_in_a_loop():
    def scanned(params, x):
        body = lambda x, w: (x + jnp.tanh(jax.nn.leaky_relu(x @ w) @ w.T), None)
        return jnp.mean(lax.scan(body, x, params)[0] ** 2)

    args = jnp.stack(layers("float32")), rows("float32")
    plan = with_bits(scanned, *args)
    found, wanted = (program(f, *args)(*args)[1] for f in (memjax.planned(scanned, plan=plan), scanned))
    np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max())


def test_a_second_derivative_where_masks_are_bits():
    """It is that of the network: nothing is rounded."""
    loss, (params, x) = dense_with(ACTIVATIONS["leaky"]), (layers("float32"), rows("float32"))
    squares = lambda f: lambda params: sum(jnp.sum(g**2) for g in jax.grad(f)(params, x))
    planned = memjax.planned(loss, plan=with_bits(loss, params, x))
    found, wanted = (jax.jit(jax.grad(squares(f)))(params) for f in (planned, loss))
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5 * np.abs(wanted[0]).max())


def test_a_plan_with_bits_is_no_policy():
    plan = with_bits(dense_with(ACTIVATIONS["where"]), layers(), rows())
    with pytest.raises(ValueError, match="masks as bits"):
        plan.as_policy()


def test_a_plan_that_packs_what_is_no_mask_is_refused():
    loss, args = dense_with(ACTIVATIONS["where"]), (layers(), rows())
    plan = with_bits(loss, *args)
    damaged = []
    for stretch in plan.stretches:
        changed = [one._replace(bits=1) if one.bits is None and "float" in one.what else one for one in stretch.kept]
        damaged.append(stretch._replace(kept=tuple(changed)))
    with pytest.raises(ValueError, match="1 bits of output"):
        jax.grad(memjax.planned(loss, plan=dataclasses.replace(plan, stretches=tuple(damaged))))(*args)
