"""Wrong arguments of `measure`, `remat` and `compress`: what is raised names the argument, what it got and what it must be.

Those of `shard` and of `linear_cross_entropy` are beside their tests.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import memjax
from memjax import compress, remat
from memjax.compress._training.layers import Statistics

X = jnp.ones((8, 4))
STEP = lambda carry, x: (carry + x, carry)
NET = lambda w, x: jnp.tanh(x @ w).sum()
WITH_CODEC = lambda codec, w, x: memjax.compressed(NET, codec)(w, x)
W, BATCH = jnp.ones((64, 64)), jnp.ones((128, 64))
SETTINGS = compress.layers(WITH_CODEC, W, BATCH)
OPTIMIZER = compress.adaptive(optax.sgd(0.1))
STATE = {"w": W, "codec": SETTINGS, "optimizer": OPTIMIZER.init({"0": {"0": W}, "codec": SETTINGS})}
SCHEDULE = {"length": 10, "slots": 3, "strategy": "mixed", "internal_size": 1, "forward_steps": 20}
PLAN = {"items": (0, 1), "seconds": 1.0, "nbytes": 1, "plain_seconds": 1.0, "plain_nbytes": 1}
SPEC = {"in_features": 4, "growth_rate": 2, "num_layers": 2}


def scan(**changes):
    arguments = {"f": STEP, "init": jnp.zeros(4), "xs": X, "slots": 3, **changes}
    return remat.scan(arguments.pop("f"), arguments.pop("init"), arguments.pop("xs"), **arguments)


def chain(**changes):
    arguments = {"budget": "1MiB", **changes}
    return remat.chain([lambda p, x: x * p] * 2, [1.0, 2.0], X, **arguments)


def chain_costs(**changes):
    return remat.chain_costs([lambda p, x: x * p] * 2, [1.0, 2.0], X, **changes)


def rnn(**changes):
    arguments = {"cell": nnx.GRUCell(4, 4, rngs=nnx.Rngs(0)), "slots": 2, **changes}
    call = {name: arguments.pop(name) for name in ("seq_lengths", "initial_carry") if name in arguments}
    call |= {"rngs": arguments.pop("stream")} if "stream" in arguments else {}
    inputs = arguments.pop("inputs", jnp.ones((2, 6, 4)))
    return remat.RNN(arguments.pop("cell"), **arguments)(inputs, **call)


def linen_rnn(**changes):
    arguments = {"cell": nn.GRUCell(4), "slots": 2, **changes}
    model, x = remat.linen.RNN(arguments.pop("cell"), **arguments), jnp.ones((2, 6, 4))
    return model.apply(model.init(jax.random.key(0), x), x)


def layers_of_chain(**changes):
    arguments = {"layers": [nnx.Linear(4, 4, rngs=nnx.Rngs(0))], "budget": "1MiB", **changes}
    return remat.Chain(*arguments.pop("layers"), **arguments)(X)


def linen_chain(**changes):
    arguments = {"layers": [nn.Dense(4)], "budget": "1MiB", **changes}
    model = remat.linen.Chain(arguments.pop("layers"), **arguments)
    return model.apply(model.init(jax.random.key(0), X), X)


def dense_block(**changes):
    x = changes.pop("x", jnp.ones((1, 4, 4, 4)))
    return remat.DenseBlock(**{**SPEC, "rngs": nnx.Rngs(0), **changes})(x)


def compressed(**changes):
    return jax.jit(jax.grad(memjax.compressed(NET, **changes)))(W, BATCH)


def layers(**changes):
    arguments = {"f": WITH_CODEC, "args": (W, BATCH), **changes}
    return compress.layers(arguments.pop("f"), *arguments.pop("args"), **arguments)


def with_settings(**changes):
    codec = dataclasses.replace(SETTINGS, **changes)
    return jax.jit(jax.grad(memjax.compressed(NET, codec)))(W, BATCH)


def train(step, *args):
    return compress.transactional(step, donate=False)(STATE, *args)


def capacities(new):
    compress.transactional(lambda state: (state, 0.0)).capacities = new


class Halving(compress.Cast):
    """Decodes to half of what it was given."""

    def decode(self, code):
        return super().decode(code)[::2]


def dense_arrays(spec=None, **changes):
    block = remat.DenseBlock(**SPEC, rngs=nnx.Rngs(0))
    params = block.params._replace(**{name: a for name, a in changes.items() if name in block.params._fields})
    running = block.running._replace(**{name: a for name, a in changes.items() if name in block.running._fields})
    return remat.dense_block(spec or block.spec, params, running, jnp.ones((1, 4, 4, 4)))


def attention(**changes):
    kernels = [jnp.ones((4, 2, 2))] * 3 + [jnp.ones((2, 2, 4))]
    return remat.attention_in_groups(jnp.ones((1, 6, 4)), *kernels, **changes)


def adaptive(state):
    params = {"w": W, "codec": SETTINGS}
    return compress.adaptive(optax.sgd(0.1)).update(params, state, params)


def transactional(**changes):
    return compress.transactional(lambda state: (state, 0.0), **changes)


def predicted_sigma(**changes):
    return compress.predicted_sigma(SETTINGS.statistics, **{"half_width": SETTINGS.bound, **changes})


def scale_gradient(**changes):
    arguments = {"gradients": {"w": W}, "by": 2.0, **changes}
    return compress.scale_gradient(arguments["gradients"], arguments["by"])


CALLS = [
    (memjax.measure, {"fn": nnx.Linear}, "fn must be a function or a module, got .*make an instance first"),
    (memjax.measure, {"fn": nn.Dense}, "fn must be a function or a module, got .*make an instance first"),
    (memjax.measure, {"fn": NET, "compiler_options": {1: 2}}, "compiler_options must be None or a dict"),
    (memjax.measure, {"fn": NET, "compiler_options": {"flag": None}}, "compiler_options must be None or a dict"),
    (scan, {"f": lambda carry: carry}, "f must be a function of 2 arguments, got"),
    (scan, {"reverse": "no"}, "reverse must be True or False, got 'no'"),
    (scan, {"reverse": jnp.ones(2)}, "reverse must be True or False, got an array"),
    (scan, {"init": np.array("a")}, "init must be an array or a number, got an array of <U1"),
    (scan, {"xs": np.array(["a", "b"])}, "xs must be an array or a number, got an array of <U1"),
    (scan, {"budget": "1MiB"}, "give exactly one of slots and budget, got slots=3 and budget='1MiB'"),
    (remat.profile, {"f": lambda carry: carry, "init": X}, "f must be a function of 2 arguments, got"),
    *(
        (remat.Schedule, {**SCHEDULE, name: value}, f"{name} must be .* got")
        for name, value in (
            ("length", None),
            ("length", -1),
            ("slots", "3"),
            ("slots", 0),
            ("strategy", "fast"),
            ("internal_size", 0),
            ("forward_steps", None),
        )
    ),
    (chain, {"costs": 1}, r"costs must be a sequence of BlockCost, .*got 1"),
    (chain, {"costs": remat.BlockCost}, r"costs must be a sequence of BlockCost, .*got"),
    (chain, {"budget": None}, "give exactly one of budget and schedule, got budget=None and schedule=None"),
    (chain_costs, {"measure": "no"}, "measure must be True or False, got 'no'"),
    (rnn, {"cell": None}, "cell must be an NNX recurrent cell, got None"),
    (rnn, {"cell": nnx.GRUCell}, "cell must be an NNX recurrent cell, got"),
    (rnn, {"cell": nnx.Linear(4, 4, rngs=nnx.Rngs(0))}, "cell must be an NNX recurrent cell, got"),
    (rnn, {"time_major": "no"}, "time_major must be True or False, got 'no'"),
    (rnn, {"return_carry": 1}, "return_carry must be True or False, got 1"),
    (rnn, {"slots": True}, "slots must be a number of carries of at least 1, got True"),
    (rnn, {"slots": None}, "give exactly one of slots and budget, got slots=None and budget=None"),
    (rnn, {"inputs": None}, "inputs must be an array, got None"),
    (rnn, {"inputs": jnp.ones(4)}, "inputs must be an array of at least 2 axes"),
    (rnn, {"seq_lengths": "a"}, "seq_lengths must be an array, got 'a'"),
    (rnn, {"seq_lengths": jnp.ones(3, int)}, r"seq_lengths must be integers of shape \(2,\)"),
    (rnn, {"seq_lengths": jnp.ones(2)}, r"seq_lengths must be integers of shape \(2,\)"),
    (rnn, {"seq_lengths": jnp.asarray([7, 2])}, r"seq_lengths must be in \[0, 6\], the steps of inputs, got \[7, 2\]"),
    (
        rnn,
        {"inputs": jnp.ones((2, 6, 5))},
        "cell must take .* inputs of one step of float32.2,5., got .*raises TypeError",
    ),
    (rnn, {"initial_carry": "a"}, "initial_carry must be an array or a number, got 'a'"),
    (rnn, {"initial_carry": jnp.ones((3, 4))}, "cell must take a carry of float32.3,4. and .* raises TypeError"),
    (rnn, {"initial_carry": (jnp.ones((2, 4)),) * 2}, "cell must take a carry of .* raises TypeError"),
    (rnn, {"stream": 3}, "rngs must be an nnx.Rngs or nnx.RngStream, got 3"),
    (rnn, {"broadcast_rngs": 3}, "broadcast_rngs must be a filter of flax.nnx, got 3"),
    (linen_rnn, {"split_rngs": 3}, "split_rngs must be a dict of names and flags, got 3"),
    (scan, {"f": nnx.GRUCell}, "f must be a function or a module, got .*make an instance first"),
    (
        scan,
        {"f": lambda c, x: (c @ jnp.ones((7, 7)), c)},
        "f must take a carry of .* and an x of .* raises TypeError: dot",
    ),
    (scan, {"f": lambda c, x: (c if c.sum() > 0 else x, c)}, "f must be a function that JAX can trace"),
    (attention, {"positions": [0, 1]}, "positions must be an array, got"),
    (attention, {"norm": lambda x: x[..., :3]}, r"the result of norm must be of shape \(1, 6, 4\), got"),
    (attention, {"rotary": lambda q, p: None}, "the result of rotary must be an array, got None"),
    (attention, {"rotary": lambda q: q}, "rotary must take array 1 of .* raises TypeError"),
    (attention, {"attend": lambda q, k, v: "text"}, "the result of attend must be an array, got 'text'"),
    (dense_arrays, {"scale1": None}, "params.scale1 must be an array, got None"),
    (dense_arrays, {"bias2": jnp.ones((2, 1))}, r"params.bias2 must be of shape \(2, 8\), as spec has it"),
    (dense_arrays, {"mean1": jnp.ones(1)}, r"running.mean1 must be of shape \(6,\), as spec has it"),
    (dense_arrays, {"spec": remat.DenseSpec(4, 2, 1)}, r"params.scale1 must be of shape \(4,\), as spec has it"),
    (dense_arrays, {"spec": remat.DenseSpec(4, 2, 2, None)}, "params.kernel1 must be None without a bottleneck"),
    (remat.ChainSchedule, {**PLAN, "items": "012"}, "items must be a tuple of numbers of blocks, .*got '012'"),
    (remat.ChainSchedule, {**PLAN, "items": (0.0, 1.0)}, "items must be a tuple of numbers of blocks"),
    (remat.ChainSchedule, {**PLAN, "items": ((), 0)}, "items must be a tuple of numbers of blocks"),
    (remat.ChainSchedule, {**PLAN, "seconds": None}, "seconds must be a finite number"),
    (linen_rnn, {"cell": nn.GRUCell}, "cell must be a Flax Linen cell, got"),
    (linen_rnn, {"cell": nn.Dense(4)}, "cell must be a Flax Linen cell, got"),
    (linen_rnn, {"cell": nnx.GRUCell(4, 4, rngs=nnx.Rngs(0))}, "cell must be a Flax Linen cell, got"),
    (rnn, {"cell": nn.GRUCell(4)}, "cell must be an NNX recurrent cell, got"),
    (linen_chain, {"layers": []}, "layers must be at least one module or function"),
    (linen_rnn, {"slots": 0}, "slots must be a number of carries of at least 1, got 0"),
    (linen_rnn, {"slots": None, "budget": "12MX"}, "budget must be a number of bytes .* got '12MX'"),
    (linen_rnn, {"slots": None}, "give exactly one of slots and budget"),
    (linen_rnn, {"time_major": "no"}, "time_major must be True or False, got 'no'"),
    (layers_of_chain, {"layers": [None]}, r"layers\[0\] must be a module or a function, got None"),
    (layers_of_chain, {"layers": [jnp.tanh, nnx.Linear]}, r"layers\[1\] must be .*make an instance first"),
    (layers_of_chain, {"budget": "12MX"}, "budget must be a number of bytes .* got '12MX'"),
    (layers_of_chain, {"budget": None, "schedule": 3}, "schedule must be a Plan or a ChainSchedule, got 3"),
    (layers_of_chain, {"layers": [nn.Dense(4)]}, r"layers\[0\] must be .*memjax.remat.linen.Chain those of Linen"),
    (linen_chain, {"layers": [nnx.Linear(4, 4, rngs=nnx.Rngs(0))]}, r"layers\[0\] must be .*memjax.remat.Chain takes"),
    (layers_of_chain, {"layers": [lambda x: x.nothing]}, "layers must take an input of .* raises AttributeError"),
    (linen_chain, {"layers": [nn.Dense]}, r"layers\[0\] must be .*make an instance first"),
    (linen_chain, {"layers": [3]}, r"layers\[0\] must be a module or a function, got 3"),
    (linen_chain, {"budget": float("nan")}, "budget must be a number of bytes .* got nan"),
    (linen_chain, {"budget": None}, "give exactly one of budget and schedule"),
    *(
        (build, {**SPEC, name: value}, f"{name} must be .* got")
        for build in (remat.DenseSpec, dense_block)
        for name, value in (
            ("in_features", None),
            ("in_features", "4"),
            ("growth_rate", True),
            ("growth_rate", 0),
            ("num_layers", 2.5),
            ("bottleneck", -1),
            ("epsilon", "1"),
            ("epsilon", float("nan")),
            ("dropout_rate", 1.0),
            ("dropout_rate", None),
        )
    ),
    (remat.DenseSpec, {**SPEC, "use_running_average": "no"}, "use_running_average must be True or False, got 'no'"),
    (dense_block, {"keep": "everything"}, "keep must be one of 'all', 'convolutions', 'features', got 'everything'"),
    (dense_block, {"implementation": "fast"}, "implementation must be one of None, 'xla', 'triton', got 'fast'"),
    (dense_block, {"rngs": 3}, "rngs must be an nnx.Rngs, got 3"),
    (dense_block, {"x": None}, "x must be an array, got None"),
    (compressed, {"where": lambda scope: True}, "where must be a function of 2 arguments, got"),
    (compressed, {"codec": Halving()}, r"codec must be one that decodes to what it was given, float32\[128,64\]"),
    *(
        (with_settings, {name: value}, f"{name} must be .* got")
        for name, value in (
            ("bound", None),
            ("bound", jnp.ones(7)),
            ("bound", jnp.ones(2, int)),
            ("statistics", Statistics.zeros(7, 1)),
            ("names", None),
            ("bits_per_value", 4.0),
            ("bits_per_value", (4.0,) * 7),
            ("bits_per_value", (-1.0, -1.0)),
            ("weights", ()),
            ("samples", 0),
        )
    ),
    (train, {"step": lambda state: state}, "step must be a function that returns a pair, got"),
    (
        train,
        {"step": lambda state: (state | {"w": W[:1]}, 0)},
        r"step must return state\['w'\] of the type .*got float32\[1,64\]",
    ),
    (train, {"step": lambda state: (state | {"w": W.astype("int8")}, 0)}, r"step must return state\['w'\] .*int8"),
    (train, {"step": lambda state: (state["w"].nothing, 0)}, "step must take the state of .* raises AttributeError"),
    (capacities, {"new": "ab"}, "capacities must be a list .* got 'ab'"),
    (capacities, {"new": [(-1.0,)]}, "bits_per_value must be a positive finite number, got -1.0"),
    (compress.Cast, {"dtype": W}, "dtype must be a floating-point dtype, got an array"),
    (compress.Cast().ratio, {"x": None}, "x must be an array, got None"),
    (compress.ErrorBounded, {"bound": np.array(["a"])}, "bound must be a positive finite number"),
    (compress.ErrorBounded, {"bound": np.bool_(True)}, "bound must be a positive finite number"),
    (layers, {"argnums": ()}, "argnums must be positions among 2 arguments"),
    (layers, {"f": lambda codec, w, x: x @ w}, "f must take .* raises TypeError: Gradient only defined for scalar"),
    (
        memjax.measure,
        {"fn": jax.jit(NET).lower(W, BATCH).compile()},
        "fn must be a function, got .*measure compiles it",
    ),
    (compress.Cast().nbytes, {"aval": "text"}, "aval must be an array or the type of one, got 'text'"),
    (compress.GroupQuantized().nbytes, {"aval": None}, "aval must be an array or the type of one, got None"),
    (layers, {"f": lambda codec: 1.0}, "f must be a function of 3 arguments, got"),
    (layers, {"args": (W,)}, "f must be a function of 2 arguments, got"),
    (layers, {"argnums": 7}, "argnums must be positions among 2 arguments, got 7"),
    (adaptive, {"state": 3}, "state must be an AdaptiveState, got 3"),
    (transactional, {"compiler_options": "fast"}, "compiler_options must be None or a dict"),
    (transactional, {"compiler_options": []}, "compiler_options must be None or a dict"),
    (transactional, {"static_argnums": 0}, "static_argnums must be left out, got 0"),
    (predicted_sigma, {"half_width": jnp.ones(99)}, r"half_width must be of shape \(\d,\)"),
    (predicted_sigma, {"coefficient": "a"}, "coefficient must be a positive finite number, got 'a'"),
    (predicted_sigma, {"coefficient": float("nan")}, "coefficient must be a positive finite number, got nan"),
    (scale_gradient, {"gradients": {"w": "text"}}, "gradients must be an array, got 'text'"),
    (scale_gradient, {"by": jnp.ones(3)}, "by must be one number, got an array"),
]


@pytest.mark.parametrize(
    ("f", "changes", "message"), CALLS, ids=[f"{i} {message[:40]}" for i, (*_, message) in enumerate(CALLS)]
)
def test_is_refused(f, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        f(**changes)


@pytest.mark.parametrize(
    "f", [scan, chain, chain_costs, rnn, linen_rnn, layers_of_chain, linen_chain, dense_block, dense_arrays, attention]
)
def test_the_calls_of_remat_are_right_as_they_stand(f):
    f()


@pytest.mark.parametrize("f", [compressed, layers, with_settings, transactional, predicted_sigma, scale_gradient])
def test_the_calls_of_compress_are_right_as_they_stand(f):
    f()
