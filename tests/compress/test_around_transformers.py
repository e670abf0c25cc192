"""Compressed Transformer layers inside of what trains them: loops over layers, named checkpoints, chains, rings."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import memjax
from memjax import compressed
from memjax.shard import metp_attention, metp_mlp
from tests.compress import transformer_layers as transformer
from tests.compress.kept import measured_bytes
from tests.compress.transformer_layers import FEATURES, HEADS, TOKENS, inputs, norm, parameters, with_rule
from tests.shard.rings import FIRST, ROWS, sharded

LAYERS = 2
MOST = {8: 0.02, 4: 0.25}  # distance of the gradient, relative to its norm


def distance(got, expected):
    wide = lambda tree: np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
    return np.linalg.norm(wide(got) - wide(expected)) / np.linalg.norm(wide(expected))


def layers():
    return [parameters(seed) for seed in range(LAYERS)]


def stacked():
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers())


def in_turn(layer, params, x):
    for p in params:
        x = layer(p, x)
    return jnp.mean(x**2)


def in_a_scan(layer, params, x):
    return jnp.mean(jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0] ** 2)


def in_remat_scan(layer, params, x):
    return jnp.mean(memjax.remat.scan(lambda x, p: (layer(p, x), None), x, params, slots=1)[0] ** 2)


def named(p, x):
    heads = lambda name: (norm(x) @ p[name]).reshape(*TOKENS, HEADS, -1)
    attended = transformer.by_softmax(heads("query"), heads("key"), heads("value"))
    x = x + checkpoint_name(attended, "attention").reshape(x.shape) @ p["out"]
    return x + (jax.nn.silu(checkpoint_name(norm(x) @ p["gate"], "gate")) * (norm(x) @ p["up"])) @ p["down"]


def gradient(loss, layer, params):
    return jax.jit(jax.grad(functools.partial(loss, layer), (0, 1)))(params, inputs())


def kept(loss, layer, params):
    return measured_bytes(functools.partial(loss, layer), params, inputs())


def test_layers_in_remat_scan():
    params = stacked()
    got = gradient(in_remat_scan, compressed(with_rule, bits=4, inputs=1), params)
    assert 1e-4 < distance(got, gradient(in_a_scan, with_rule, params)) < MOST[4]


@pytest.mark.parametrize(("is_outside", "bits"), [(True, 8), (False, 4)])
def test_checkpoints_with_names(is_outside, bits):
    policy = jax.checkpoint_policies.save_only_these_names("attention", "gate")
    checkpoint = functools.partial(jax.checkpoint, policy=policy)
    small = compressed(named, bits=bits)
    both = checkpoint(small) if is_outside else compressed(checkpoint(named), bits=bits)
    assert 1e-4 < distance(gradient(in_turn, both, layers()), gradient(in_turn, named, layers())) < MOST[bits]
    plain, checkpointed, nbytes = (kept(in_turn, layer, layers()) for layer in (named, checkpoint(named), both))
    assert checkpointed < plain
    # Outside, what is named is kept as it is and codes are made when the layer runs again; inside, what is named is encoded.
    assert nbytes <= checkpointed * (1 if is_outside else 0.6)


def test_a_planned_function_with_compressed_layers():
    plain = lambda p, x: x + jax.nn.silu(norm(x) @ p["gate"]) @ p["down"]
    small = compressed(plain, bits=4, inputs=1)
    loss = memjax.planned(functools.partial(in_turn, small), budget="64MiB")
    params = [{name: p[name] for name in ("gate", "down")} for p in layers()]
    got = jax.jit(jax.grad(loss))(params, inputs())
    want = jax.jit(jax.grad(functools.partial(in_turn, plain)))(params, inputs())
    assert 1e-4 < distance(got, want) < MOST[4]


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
        return x + nn.Dense(FEATURES)(nn.gelu(nn.Dense(4 * FEATURES)(nn.LayerNorm()(x))))


class LinenStack(nn.Module):
    bits: int | None

    @nn.compact
    def __call__(self, x):
        def turn(mdl, x, _):
            layer = LinenLayer(parent=None)
            layer = layer if self.bits is None else compressed(layer, bits=self.bits)
            return layer.clone(parent=mdl, name="layer")(x), None

        scan = nn.scan(turn, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return scan(self, x, None)[0]


@pytest.mark.parametrize("bits", [8])
def test_linen_layers_in_a_scan(bits):
    params = jax.jit(LinenStack(None).init)(jax.random.key(0), inputs())
    loss = lambda model, params, x: jnp.mean(model.apply(params, x) ** 2)
    got, want = (gradient(loss, LinenStack(of), params) for of in (bits, None))
    assert 1e-4 < distance(got, want) < MOST[bits]
    plain, small = (kept(loss, LinenStack(of), params) for of in (None, bits))
    assert small < plain / (2 if bits == 8 else 3)


class NNXLayer(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(FEATURES, 512, rngs=rngs), nnx.Linear(512, FEATURES, rngs=rngs)
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("bits", [4])
def test_nnx_layers_in_a_scan(bits):
    stack = nnx.vmap(NNXLayer)(nnx.Rngs(0).split(LAYERS))

    def loss(bits, stack, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def over(x, layer):
            return (layer if bits is None else compressed(layer, bits=bits))(x)

        return jnp.mean(over(x, stack) ** 2)

    got, want = (nnx.jit(nnx.grad(functools.partial(loss, of)))(stack, inputs()) for of in (bits, None))
    assert 1e-4 < distance(got, want) < MOST[bits]


@pytest.mark.parametrize("bits", [4])
def test_rings(bits):
    """Each device encodes its own tokens."""

    def layer(p, x):
        heads = lambda name: (norm(x) @ p[name]).reshape(*x.shape[:2], HEADS, -1)
        attended = metp_attention(heads("query"), heads("key"), heads("value"), axis_name="ring", causal=True)
        x = x + attended.reshape(x.shape) @ p["out"]
        mlp = functools.partial(metp_mlp, activation=jax.nn.silu, axis_name="ring", recompute=False)
        return x + mlp(norm(x), p["up"], p["down"], w_gate=p["gate"])

    def loss(layer, p, x):
        specs = dict.fromkeys(("query", "key", "value", "out"), PartitionSpec())
        specs |= dict.fromkeys(("up", "gate"), ROWS) | {"down": FIRST}
        return jnp.mean(sharded(layer, 4, (specs, ROWS), ROWS)(p, x) ** 2)

    p, x = parameters(), np.random.default_rng(3).normal(size=(2, 256, FEATURES)).astype(np.float32)
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, one), (0, 1)))(p, x)
        for one in (compressed(layer, bits=bits, inputs=1), layer)
    )
    assert 1e-4 < distance(got, want) < MOST[bits]
