"""Float32 masters in two halves: training bit for bit, the bijection, updates that are exact or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import memjax
from memjax import compress
from memjax.compress._state.bfloat16 import bits, update_between
from memjax.compress._state.split_master import _halves, _joined

LION = lambda: optax.lion(1e-2, weight_decay=0.1)
ADAMW = lambda: optax.adamw(1e-2, weight_decay=0.1)
UPWARDS = np.array([0, 0x7F7F, 0x7F80, 0x3F80, 0xBF80, 0x8000, 1, 0x8001], np.uint16)


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def masters(seed=0):
    a, b = (jax.random.normal(jax.random.key(seed + i), shape) for i, shape in enumerate([(24, 32), (32, 8)]))
    return {"a": a * 0.3, "b": b * 0.3, "norm": jnp.ones(32)}


def as_weights(master):
    """The bfloat16 weights that the pair has of these masters: to the nearest, ties away from zero."""
    nearest = lambda m: jax.lax.bitcast_convert_type(_halves(m)[0], jnp.bfloat16)
    return {name: m if name == "norm" else nearest(m) for name, m in master.items()}


def loss(weights, x):
    wide = {name: w.astype(jnp.float32) for name, w in weights.items()}
    y = jnp.tanh(x @ wide["a"]) * wide["norm"] @ wide["b"]
    return jnp.mean(jnp.square(y - jnp.sin(3 * x[:, :8])))


def trained(tx, jit, steps=200):
    """Masters after training with halves, and after training of float32 weights whose roundings the model sees."""
    split = compress.split_master(tx)

    def step_of_halves(state, x):
        weights, opt = state
        updates, opt = split.update(jax.grad(loss)(weights, x), opt, weights)
        return optax.apply_updates(weights, updates), opt

    def step_of_floats(state, x):
        master, opt = state
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss)(as_weights(master), x))
        updates, opt = tx.update(gradients, opt, master)
        return optax.apply_updates(master, updates), opt

    master = masters()
    weights, opt = jax.jit(lambda master: compress.set_master(master, split.init(as_weights(master))))(master)
    master = jax.tree.map(jnp.array, master)  # both are donated
    states = [(weights, opt), (master, jax.jit(tx.init)(master))]
    steppers = [jit(step) for step in (step_of_halves, step_of_floats)]
    for i in range(steps):
        x = jax.random.normal(jax.random.key(100 + i), (16, 24))
        states = [step(state, x) for step, state in zip(steppers, states, strict=True)]
    (weights, opt), (master, _) = states
    return weights, compress.join_master(weights, opt), master


@pytest.mark.parametrize("tx", [ADAMW, LION], ids=["adamw", "lion"])
@pytest.mark.parametrize(
    "jit", [jax.jit, lambda f: memjax.jit(f, budget="1MiB", donate_argnums=0)], ids=["jax.jit", "memjax.jit"]
)
def test_training_is_that_of_float32_weights_bit_for_bit(tx, jit):
    weights, joined, master = trained(tx(), jit)
    for name in master:
        np.testing.assert_array_equal(joined[name].view(jnp.uint32), master[name].view(jnp.uint32))
    assert weights["a"].dtype == jnp.bfloat16
    assert not np.array_equal(master["a"], masters()["a"])


def test_halves_are_those_of_any_master():
    rng = np.random.default_rng(0)
    high = np.concatenate([UPWARDS, rng.integers(0, 2**16, 4096, np.uint16)]).astype(np.uint32)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    master = ((high[:, None] << 16) | low).view(np.float32)
    master = master[~np.any(np.isnan(master), 1)]
    weight, rest = jax.device_get(jax.jit(_halves)(master))
    weight = weight.view(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(jax.jit(_joined)(weight, rest)).view(np.uint32), master.view(np.uint32))
    is_tie = low == 0x8000
    # As `astype`, but for ties: these go away from zero.
    nearest = master.astype(jnp.bfloat16)
    np.testing.assert_array_equal(weight[:, ~is_tie].view(np.uint16), nearest[:, ~is_tie].view(np.uint16))
    assert np.all(np.abs(weight[:, is_tie]) >= np.abs(nearest[:, is_tie]))
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    weight = jax.jit(lambda x: jax.lax.bitcast_convert_type(_halves(x)[0], jnp.bfloat16))(nans)
    assert np.all(np.isnan(weight))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_updates_are_exact_where_no_number_is(jit):
    old = jnp.asarray([1, 1, -3, 0, jnp.inf, 2.0**-120], jnp.bfloat16)
    new = jnp.asarray([1.01 * 2**-30, -1, 2**-100, -0.0, 1, 3e38], jnp.bfloat16)
    for u in (new - old, new.astype(jnp.float32) - old.astype(jnp.float32)):
        added = (old.astype(jnp.float32) + u.astype(jnp.float32)).astype(jnp.bfloat16)
        assert added[0] != new[0]
    updates = update_between(old, bits(new))
    added = jit(optax.apply_updates)(old, updates)
    np.testing.assert_array_equal(bits(added), bits(new))
    np.testing.assert_array_equal(np.asarray(old) + updates, optax.apply_updates(old, updates))


def test_what_changes_updates_afterwards_is_not_silent():
    weights = jnp.ones((4,), jnp.bfloat16)

    def after(tx):
        tx = optax.chain(compress.split_master(optax.sgd(0.1)), tx)
        updates, _ = jax.jit(lambda weights: tx.update(weights, tx.init(weights), weights))(weights)
        return optax.apply_updates(weights, updates)

    with pytest.raises(TypeError, match="added as they are, got float32: put memjax's transformation last"):
        after(optax.scale(0.5))
    for tx in (optax.scale_by_schedule(lambda _: 2), optax.scale(-1), optax.scale_by_schedule(lambda _: 1e-3)):
        assert np.all(np.isnan(after(tx)))
    with pytest.raises(TypeError):
        after(optax.clip(0.1))
    with pytest.raises((TypeError, ValueError)):
        after(optax.add_decayed_weights(0.1))
    updates, _ = (tx := compress.split_master(optax.sgd(0.1))).update(weights, tx.init(weights), weights)
    with pytest.raises(TypeError, match="got float32 weights"):
        optax.apply_updates(weights.astype(jnp.float32), updates)


def test_masked_updates_change_nothing():
    weights = {"a": jnp.ones((4,), jnp.bfloat16), "b": jnp.ones((4,), jnp.bfloat16)}
    gradients = jax.tree.map(lambda w: w * jnp.bfloat16(0.37), weights)
    inner = lambda: compress.split_master(optax.adam(0.01))
    several = optax.MultiSteps(inner(), 2).gradient_transformation()
    state, seen = jax.jit(several.init)(weights), [weights["a"]]
    for _ in range(4):
        updates, state = several.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        seen.append(weights["a"])
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[2], seen[3])
    plain = optax.adam(0.01)
    master, opt = {"a": jnp.ones(4)}, plain.init({"a": jnp.ones(4)})
    for _ in range(2):
        updates, opt = plain.update({"a": gradients["a"].astype(jnp.float32)}, opt, master)
        master = optax.apply_updates(master, updates)
    np.testing.assert_array_equal(compress.join_master(weights, state)["a"], master["a"])


def test_it_works_in_an_nnx_optimizer():
    model = nnx.Linear(8, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    before = jnp.asarray(model.kernel[...])
    optimizer = nnx.Optimizer(model, compress.split_master(optax.adam(1e-4)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(x).astype(jnp.float32)))(model))

    is_variable = lambda node: isinstance(node, nnx.Variable)
    arrays = lambda tree: jax.tree.map(lambda v: v[...] if is_variable(v) else v, tree, is_leaf=is_variable)
    for _ in range(3):
        step(model, optimizer, jnp.ones((2, 8), jnp.bfloat16))
    joined = compress.join_master(arrays(nnx.state(model, nnx.Param)), arrays(optimizer.opt_state))
    np.testing.assert_allclose(joined["kernel"] - before.astype(jnp.float32), -3e-4, rtol=1e-3)


def test_errors_say_what_to_do():
    with pytest.raises(TypeError, match=r"tx must be a gradient transformation.*gradient_transformation\(\)"):
        compress.split_master(optax.MultiSteps(optax.sgd(0.1), 2))
    tx = compress.split_master(optax.sgd(0.1))
    with pytest.raises(ValueError, match="some are bfloat16"):
        tx.init(jnp.ones(3))
    with pytest.raises(TypeError, match=r"cast them to jnp\.bfloat16"):
        tx.init([jnp.ones(3, jnp.float16), jnp.ones(3, jnp.bfloat16)])
    weights = jnp.ones(3, jnp.bfloat16)
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(weights, tx.init(weights))
    with pytest.raises(TypeError, match=r"state must be a SplitMasterState"):
        tx.update(weights, (), weights)
    with pytest.raises(ValueError, match=r"one state of memjax\.compress\.split_master in it, got 0"):
        compress.join_master(weights, ())
    with pytest.raises(TypeError, match="master must be float32 weights"):
        compress.set_master(weights, tx.init(weights))
    assert type(compress.split_master(optax.sgd(0.1))) is type(optax.sgd(0.1))
    assert type(compress.split_master(optax.identity())) is type(optax.identity())
