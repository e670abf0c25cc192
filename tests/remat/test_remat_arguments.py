"""Wrong arguments of everything in `memjax.remat`: an error that names the argument, what it must be and what it got."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax import measure, remat, remat_compiler_options
from memjax.remat import DenseBlock, DenseSpec, policies

X = jnp.ones((1, 4, 4, 4))
NAN, INF = float("nan"), float("inf")
COUNTS = (None, "3", int, [1], NAN, INF, -3, 0, True, 0.5, jnp.ones(3))
AMOUNTS = ("three", int, [1], NAN, INF, -3, True, 0.5, "infMiB", "12 G B", 10**30, b"1MiB")
RATES = (None, "0.5", float, [0.5], NAN, INF, -0.1, 1, True)
FUNCTIONS = (None, "sin", 3, [jnp.sin], NAN)
CHOICES = ("best", int, ["all"], NAN, 0, True)
FLAGS = (None, "yes", bool, [True], NAN, 1, jnp.ones(3))


def step(h, x):
    return jnp.sin(h * x), x


def dense_block(**change):
    block = DenseBlock(4, 2, 2, rngs=nnx.Rngs(0))
    arguments = {"spec": block.spec, "params": block.params, "running": block.running, "x": X} | change
    return remat.dense_block(**arguments)


def dense_module(**change):
    return DenseBlock(**({"in_features": 4, "growth_rate": 2, "num_layers": 2, "rngs": nnx.Rngs(0)} | change))


def dense_spec(**change):
    return DenseSpec(**({"in_features": 4, "growth_rate": 2, "num_layers": 2} | change))


def scan(**change):
    return remat.scan(**({"f": step, "init": jnp.ones(2), "xs": jnp.ones((6, 2))} | change))


def chain(**change):
    blocks = [lambda p, x: jnp.tanh(x @ p)] * 3
    return remat.chain(**({"blocks": blocks, "params": [jnp.ones((2, 2))] * 3, "x": jnp.ones(2)} | change))


def rnn(**change):
    return remat.RNN(**({"cell": nnx.SimpleCell(2, 2, rngs=nnx.Rngs(0))} | change))


def attention(**change):
    return remat.AttentionInGroups(**({"dim": 8, "heads": 2, "rngs": nnx.Rngs(0)} | change))


def linen_rnn(**change):
    model, x = remat.linen.RNN(nn.SimpleCell(2), **change), jnp.ones((1, 5, 2))
    return model.apply(model.init(jax.random.key(0), x), x)


def linen_chain(layers=(jnp.tanh,), **change):
    return remat.linen.Chain(layers, **change).apply({}, X)


CALLS = [
    (dense_block, "spec", (None, "spec", DenseSpec, [1], NAN, 3)),
    (dense_block, "params", (None, "params", [1], {}, NAN, X)),
    (dense_block, "running", (None, "running", [1], {}, NAN, X)),
    (dense_block, "x", (None, "x", [1], NAN, 3, np.int64(2), jnp.ones(3), X.astype(jnp.int32), X[..., :3])),
    (dense_block, "keep", (None, *CHOICES)),
    (dense_block, "dropout_key", ("key", int, [1], NAN, 3, X)),
    (dense_block, "implementation", CHOICES),
    (dense_module, "in_features", COUNTS),
    (dense_module, "growth_rate", COUNTS),
    (dense_module, "num_layers", COUNTS),
    (dense_module, "bottleneck", COUNTS[1:]),
    (dense_module, "keep", (None, *CHOICES)),
    (dense_module, "dropout_rate", RATES),
    (dense_module, "momentum", RATES),
    (dense_module, "epsilon", RATES[:-2]),
    (dense_module, "dtype", ("three", int, [1], NAN, 3, True, X)),
    (dense_module, "param_dtype", (None, "three", int, [1], NAN, 3, True, X)),
    (dense_module, "implementation", CHOICES),
    (dense_module, "rngs", (None, nnx.Rngs, 0, jax.random.key(0))),
    (dense_spec, "in_features", COUNTS),
    (dense_spec, "use_running_average", FLAGS),
    (attention, "groups", COUNTS[1:]),
    (attention, "tile", COUNTS[1:]),
    (attention, "norm", FUNCTIONS[1:]),
    (attention, "rotary", (*FUNCTIONS[1:], jnp.sin)),
    (attention, "attend", (*FUNCTIONS[1:], jnp.sin)),
    (attention, "keep_attention", FLAGS),
    (lambda ax: remat.schedule(4, 2).plot(ax), "ax", ("three", 3)),
    (lambda unroll: linen_rnn(slots=2, unroll=unroll), "unroll", (None, "3", [1], NAN, -3, 0.5)),
    (scan, "slots", COUNTS[1:]),
    (scan, "budget", AMOUNTS),
    (lambda reverse: scan(slots=3, reverse=reverse), "reverse", FLAGS),
    (lambda xs: scan(slots=3, xs=xs), "xs", (NAN, 3, "xs", 10**30, [1])),
    (chain, "budget", AMOUNTS),
    (chain, "schedule", ("three", int, [1], NAN, 3, True)),
    (lambda costs: chain(budget="1MiB", costs=costs), "costs", ("three", int, NAN, 3, True, [1])),
    (lambda measure: remat.chain_costs([step], [1.0], 1.0, measure=measure), "measure", FLAGS),
    (rnn, "slots", COUNTS[1:]),
    (rnn, "budget", AMOUNTS),
    (lambda cell: rnn(cell=cell, slots=3), "cell", (None, "lstm", nnx.LSTMCell, [1], 3)),
    (linen_rnn, "slots", COUNTS[1:]),
    (linen_rnn, "budget", AMOUNTS),
    (lambda layers: remat.Chain(layers, budget=100), "layers", (None, "tanh", nnx.Linear, [1], 3)),
    (lambda **change: remat.Chain(jnp.tanh, **change), "budget", AMOUNTS),
    (lambda **change: remat.Chain(jnp.tanh, **change), "schedule", ("three", int, [1], NAN, 3, True)),
    (lambda layers: linen_chain(layers, budget=100), "layers", ("tanh", [nn.Dense], [1])),
    (linen_chain, "budget", AMOUNTS),
    (linen_chain, "schedule", ("three", int, [1], NAN, 3, True)),
    (lambda names: policies.save(names), "names", (None, "", str, ["a"], NAN, 3, True)),
    (lambda names: policies.offload(names), "names", (None, "", str, ["a"], NAN, 3, True)),
    (lambda f: remat.checkpoint(f), "f", FUNCTIONS),
    (lambda prevent_cse: remat.checkpoint(step, prevent_cse=prevent_cse), "prevent_cse", FLAGS),
    (lambda fn: measure(fn, X), "fn", FUNCTIONS),
    (
        lambda compiler_options: measure(jnp.sin, X, compiler_options=compiler_options),
        "compiler_options",
        (3, "a", [1]),
    ),
    (remat_compiler_options, "backend", CHOICES),
]


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [pytest.param(call, name, value) for call, name, values in CALLS for value in values],
)
def test_refuses(call, name, value):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}\S* must be .*, got "):
        call(**{name: value})


@pytest.mark.parametrize("huge", ["in_features", "growth_rate", "num_layers", "bottleneck"])
def test_blocks_that_no_machine_holds(huge):
    with pytest.raises(ValueError, match="in_features, growth_rate and num_layers must give fewer than"):
        dense_module(**{huge: 10**30})


def test_integers_of_numpy():
    two = np.int64(2)
    block = dense_module(in_features=two, growth_rate=two, num_layers=two, bottleneck=two)
    assert type(hash(block.spec)) is int
    run = nnx.jit(lambda model, x: model(x))
    assert run(block, X[..., :2]).shape == (1, 4, 4, 6)
    assert run(rnn(slots=two), jnp.ones((1, 5, 2))).shape == (1, 5, 2)
    assert linen_rnn(slots=two).shape == (1, 5, 2)
    assert rnn(budget=np.int64(1000)).budget == 1000
