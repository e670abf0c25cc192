"""Updates by kernels: the same bits as without, in place, and where there are none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import memjax
from memjax import compress
from memjax.compress._state import kernel, kernel_call, regions


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def found(monkeypatch):
    """The regions that became kernels, which are interpreted; small arrays, too."""
    seen, call = [], kernel_call.call
    monkeypatch.setattr(kernel, "_FEWEST", 1024)
    monkeypatch.setattr(regions, "has_kernels", lambda: True)
    monkeypatch.setattr(regions, "is_of_one_device", lambda aval: True)  # of the eight that tests have
    monkeypatch.setattr(kernel_call, "call", lambda region, values: seen.append(region) or call(region, values))
    return seen


WRAPPERS = {"split": compress.split_master, "rounded": compress.stochastic_round}


def trained(tx, weights, steps=2):
    @jax.jit
    def step(weights, state, gradients):
        updates, state = tx.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    rng, state = np.random.default_rng(1), jax.jit(tx.init)(weights)
    for _ in range(steps):
        gradients = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype), weights)
        weights, state = step(weights, state, gradients)
    return weights, state


def same_bits(one, other):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), one, other)


@pytest.mark.parametrize(("kind", "bits"), [("split", 4), ("rounded", 8)])
def test_a_kernel_has_the_bits_of_the_program(kind, bits, found, monkeypatch):
    """By operations that round the same however they are fused: momentum that halves, and rates that are powers of two."""
    rng = np.random.default_rng(0)
    shapes = {"a": (96, 64), "b": (3, 48, 32), "bias": (64,), "odd": (96, 50)}
    weights = {name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for name, shape in shapes.items()}
    tx = WRAPPERS[kind](memjax.compressed(optax.sgd(2.0**-6, momentum=0.5), bits=bits))
    by_kernels = trained(tx, weights)
    assert {region.shape for region in found} == {(96, 64), (3, 48, 32)}
    with monkeypatch.context() as context:
        context.setattr(regions, "has_kernels", lambda: False)
        same_bits(by_kernels, trained(tx, weights))


def test_arithmetic_in_a_kernel_is_as_good(found, monkeypatch):
    """It divides by numbers and roots in another way: after the first step, before codes have been read, that is all."""
    weights = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(96, 64)), jnp.float32)}
    tx = memjax.compressed(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.3, weight_decay=0.1)))
    by_kernels, _ = trained(tx, weights, steps=1)
    assert len(found) == 1
    monkeypatch.setattr(regions, "has_kernels", lambda: False)
    np.testing.assert_allclose(by_kernels["a"], trained(tx, weights, steps=1)[0]["a"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_in_a_kernel_are_those_without(bits, found, monkeypatch):
    """Of states that are the gradient, and its square: all ranges, zeros, what is not finite."""
    rng = np.random.default_rng(0)
    x = np.exp2(6 * rng.normal(size=(64, 64))) * rng.choice([-1, 0, 1], (64, 64))
    x[1, 3], x[2, 40], x[3, 7], x[4, :] = np.nan, np.inf, 1e18, 1e-39
    tx = memjax.compressed(optax.chain(optax.ema(0.0, debias=False), optax.scale_by_rms(decay=0.0)), bits=bits)
    state = jax.jit(tx.init)(jnp.zeros(x.shape))
    step = lambda: jax.jit(lambda g, s: tx.update(g, s, g)[1])(jnp.asarray(x, jnp.float32), state)
    coded = step()
    assert len(found) == 1
    with monkeypatch.context() as context:
        context.setattr(regions, "has_kernels", lambda: False)
        same_bits(coded, step())


def test_what_takes_the_place_of_what(found):
    """Codes, exponents, weights and low halves are written where the old ones were: nothing is allocated."""
    tx = compress.split_master(memjax.compressed(optax.adamw(1e-3)))
    weights = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    closed = jax.make_jaxpr(tx.update)(weights, jax.eval_shape(tx.init, weights), weights)
    [region] = found
    kinds = lambda atoms: sorted(f"{var.aval.dtype}{var.aval.shape}" for var in atoms)
    assert [old.aval.size for old in region.old] == [out.aval.size for out in region.outputs]
    assert kinds(region.old)[:1] == ["bfloat16(64, 64)"]
    assert "uint16(64, 64)" in kinds(region.old)
    [update] = [eqn for eqn in closed.eqns if eqn.primitive.name == "memjax_update"]
    inner = jax.make_jaxpr(lambda *values: kernel.run(region, values))(*(atom.aval for atom in update.invars))
    [call] = [eqn for eqn in inner.eqns if eqn.primitive.name == "pallas_call"]
    assert len(call.params["input_output_aliases"]) == len(region.outputs) == 6


@pytest.mark.parametrize(
    ("tx", "count"),
    [
        (optax.lamb(1e-3), 0),  # the update's norm scales it: it is not elementwise
        (optax.adamw(optax.cosine_decay_schedule(1e-3, 10)), 1),
        (optax.lion(1e-3), 1),
        (optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(), 3),  # only codes, of what branches make
        (optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3), 1),
        (optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(1e-3, momentum=0.9)), 1),
    ],
)
def test_optimizers_with_and_without_kernels(tx, count, found):
    weights = jnp.ones((64, 64), jnp.bfloat16)  # moments have this dtype, too
    small = memjax.compressed(tx)
    state = jax.eval_shape(small.init, weights)
    updates, after = jax.eval_shape(jax.jit(small.update), weights, state, weights)
    assert (updates.shape, updates.dtype) == (weights.shape, weights.dtype)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert len(found) == count


def test_an_update_in_a_branch_has_its_own_kernel(found):
    several = optax.MultiSteps(memjax.compressed(optax.adam(1e-3)), 2).gradient_transformation()
    tx, weights = optax.chain(memjax.compressed(optax.ema(0.9)), several), {"w": jnp.ones((64, 64), jnp.bfloat16)}
    trained(compress.split_master(tx), weights, steps=1)
    assert {len(region.outputs) for region in found} == {3, 5}  # updates, and one code or two with exponents
