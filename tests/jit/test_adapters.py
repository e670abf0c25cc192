"""Low-rank adapters (LoRA) on weights in bfloat16 that stay as they are, under an optimizer whose state lies in codes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import memjax

LAYERS, WIDTH, RANK, STEPS = 4, 64, 32, 6
TRAINED = {"base": False, "adapters": True}
LABELS = {"base": "frozen", "adapters": "trained"}
ADAMW = optax.adamw(1e-2, b2=0.99)


def frozen_by_label(trained):
    return optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, LABELS)


def frozen_by_mask(trained):
    is_frozen = {name: not is_trained for name, is_trained in TRAINED.items()}
    return optax.chain(optax.masked(trained, TRAINED), optax.masked(optax.set_to_zero(), is_frozen))


OPTIMIZERS = {  # labels are masks to optax, one for each
    "codes in labels": (frozen_by_label(memjax.compressed(ADAMW)), frozen_by_label(ADAMW)),
    "a mask in codes": (memjax.compressed(frozen_by_mask(ADAMW)), frozen_by_mask(ADAMW)),
}


def weights():
    rng = np.random.default_rng(0)
    of = lambda shape, dtype: jax.device_put(np.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), dtype))
    down = of((LAYERS, WIDTH, RANK), jnp.float32)
    adapters = {"down": down, "up": jnp.zeros((LAYERS, RANK, WIDTH))}
    return {"base": of((LAYERS, WIDTH, WIDTH), jnp.bfloat16), "adapters": adapters}


def layer(x, p):
    down, up = (p["adapters"][name].astype(x.dtype) for name in ("down", "up"))
    return x + jnp.tanh(x @ p["base"] + x @ down @ up), None


def loss(params, x):
    return jnp.mean((jax.lax.scan(layer, x, params)[0] - jnp.roll(x, 1, 1)).astype(jnp.float32) ** 2)


def trained(tx, jit):
    """Weights after some steps, and the state."""

    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    step, params = jit(step), weights()
    state = jax.jit(tx.init)(params)
    for i in range(STEPS):
        params, state = step(params, state, jax.random.normal(jax.random.key(i), (32, WIDTH), jnp.bfloat16))
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_adapters_are_trained_and_the_rest_stays(name):
    coded, plain = OPTIMIZERS[name]
    found, state = trained(coded, lambda f: memjax.jit(f, budget="80%", donate_argnums=(0, 1)))
    wanted, _ = trained(plain, jax.jit)
    before = weights()
    np.testing.assert_array_equal(np.asarray(found["base"]).view("u2"), np.asarray(before["base"]).view("u2"))
    for one, other, begun in zip(*map(jax.tree.leaves, (found, wanted, before)), strict=True):
        if begun.dtype == jnp.float32:
            error = np.linalg.norm(one - other) / np.linalg.norm(other - begun)
            assert 0 < error < 0.07, "what codes cost where gradients are noise"
    values = sum(leaf.size for leaf in jax.tree.leaves(before["adapters"]))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert 2 * values < held < 2.1 * values, "two moments of adapters, nothing of what is frozen"
