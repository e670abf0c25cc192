"""`remat.RNN` and `remat.linen.RNN` against Flax's own, in float64."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax import remat
from tests.remat.chain.chain_cases import close

B, T, F, H = 3, 13, 4, 5
LENGTHS = np.array([13, 1, 7])


@pytest.fixture(autouse=True)
def _double(x64):
    pass


def inputs(time_major=False):
    x = jax.device_put(np.random.default_rng(1).normal(size=(B, T, F)))
    return x.swapaxes(0, 1) if time_major else x


def cell(kind=nnx.OptimizedLSTMCell):
    return kind(F, H, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0))


def gradients(rnn, x, **call):
    """Outputs, and gradients of all parameters, the inputs and the initial carry."""
    graph, params, rest = nnx.split(rnn, nnx.Param, ...)

    def loss(params, x, carry):
        out = nnx.merge(graph, params, rest, copy=True)(x, initial_carry=carry, **call)
        weights = jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape), out)
        return sum(jax.tree.leaves(jax.tree.map(lambda y, w: (y * w).sum(), out, weights))), out

    start = jax.device_put(np.random.default_rng(2).normal(size=(B, H)))
    carry = (start, start + 1) if isinstance(rnn.cell, nnx.OptimizedLSTMCell) else start
    run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    return quick(run)(params, x, carry)


def quick(f):
    """`jax.jit` that optimises no machine code."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


CALLS = [
    {"reverse": True},
    {"reverse": True, "keep_order": True},
    {"time_major": True, "return_carry": True},
    {"seq_lengths": LENGTHS},
    {"seq_lengths": LENGTHS, "return_carry": True, "reverse": True},
    {"seq_lengths": LENGTHS, "return_carry": True, "reverse": True, "keep_order": True, "time_major": True},
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_nnx_options(call):
    x = inputs(call.get("time_major", False))
    expected = gradients(nnx.RNN(cell()), x, **call)
    if "seq_lengths" in call:
        how = {"budget": "min"} if call is CALLS[4] else {"slots": 3}  # to find slots for a budget takes long
        close(gradients(remat.RNN(cell(), **how), x, **call), expected)
        return
    close(gradients(remat.RNN(cell(), slots=3, **call), x), expected)


@pytest.mark.parametrize("unroll", [1, T])
def test_unroll(unroll):
    """Reaches the scan, in both kinds of modules."""
    x = inputs()
    looped = lambda f, *arguments: "while" in jax.jit(f).lower(*arguments).as_text()
    start = jnp.zeros((B, H), jnp.float64)
    rnn = remat.RNN(cell(nnx.SimpleCell), slots=3, unroll=unroll)
    assert looped(lambda x: rnn(x, initial_carry=start), x) == (unroll == 1)
    model = remat.linen.RNN(nn.SimpleCell(H, param_dtype=jnp.float64), slots=3, unroll=unroll)
    variables = model.init(jax.random.key(0), x)
    assert looped(lambda x: model.apply(variables, x, initial_carry=start), x) == (unroll == 1)


class DropoutCell(nnx.RNNCellBase):
    """A GRU with dropout on its inputs, and statistics of them."""

    def __init__(self, rngs):
        self.gru = nnx.GRUCell(F, H, param_dtype=jnp.float64, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros((), jnp.float64))

    def __call__(self, carry, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean()
        return self.gru(carry, self.dropout(x) + self.mean[...])

    def initialize_carry(self, *args, **kwargs):
        return self.gru.initialize_carry(*args, **kwargs)

    @property
    def num_feature_axes(self):
        return 1


@pytest.mark.parametrize(("broadcast", "how"), [(None, {"budget": "min"}), ("dropout", {"slots": 3})], ids=str)
def test_nnx_dropout_and_state(broadcast, how):
    """The same masks as Flax's at every step, or one for all; the state moves on alike, and differs in the next call."""

    def run(kind, **options):
        rnn = kind(DropoutCell(nnx.Rngs(0, dropout=7)), broadcast_rngs=broadcast, **options)

        @nnx.jit
        def gradient(rnn, x):
            first = nnx.value_and_grad(lambda rnn: (rnn(x) ** 2).sum())(rnn)
            return first, rnn(x)

        return *gradient(rnn, inputs()), nnx.state(rnn, nnx.BatchStat), nnx.state(rnn, nnx.RngCount)

    close(run(remat.RNN, **how), run(nnx.RNN))


def test_nnx_dropout_differs_between_steps_and_calls():
    rnn = remat.RNN(DropoutCell(nnx.Rngs(0, dropout=7)), budget="min")
    x = jnp.ones((B, T, F))
    first, second = rnn(x), rnn(x)
    assert float(jnp.abs(first - second).max()) > 1e-3


def test_checkpoints_are_interchangeable():
    ours, flaxs = remat.RNN(cell(), slots=3), nnx.RNN(cell())
    assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(flaxs))
    nnx.update(ours, jax.tree.map(lambda leaf: leaf * 2, nnx.state(flaxs, nnx.Param)))
    nnx.update(flaxs, nnx.state(ours, nnx.Param))
    close(ours(inputs()), flaxs(inputs()))


def test_inside_bidirectional():
    both = [
        nnx.Bidirectional(*pair)
        for pair in (
            (remat.RNN(cell(), slots=2), remat.RNN(cell(), budget="min")),
            (nnx.RNN(cell()), nnx.RNN(cell())),
        )
    ]
    run = nnx.jit(lambda model, x: model(x, seq_lengths=LENGTHS))
    close(*(run(model, inputs()) for model in both))


def test_memory_is_that_of_the_budget():
    wide = nnx.OptimizedLSTMCell(8, 32, rngs=nnx.Rngs(0))
    x = jnp.zeros((200, 16, 8), jnp.float32)

    def temp(rnn, **call):
        graph, params, rest = nnx.split(rnn, nnx.Param, ...)

        def loss(params):
            return sum((y**2).sum() for y in jax.tree.leaves(nnx.merge(graph, params, rest, copy=True)(x, **call)))

        return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes

    outputs = 200 * 16 * 32 * 4
    lengths = np.full(16, 150)
    for call in ({}, {"seq_lengths": lengths, "return_carry": True}):
        budget = 3 * outputs
        ours = temp(remat.RNN(wide, time_major=True, budget=budget), **call)
        assert ours <= budget + outputs  # of what follows the scan
        assert ours < 0.4 * temp(nnx.RNN(wide, time_major=True), **call)


@pytest.mark.parametrize("options", [{}, {"slots": 2, "budget": 100}])
def test_memory_must_be_given_once(options):
    with pytest.raises(ValueError, match="exactly one of slots and budget"):
        remat.RNN(cell(), **options)
    model = remat.linen.RNN(nn.SimpleCell(H, param_dtype=jnp.float64), **options)
    variables = model.init(jax.random.key(0), inputs())
    with pytest.raises(ValueError, match="exactly one of slots and budget"):
        model.apply(variables, inputs())


def test_cells_that_add_variables_are_refused():
    class Adding(nnx.SimpleCell):
        def __call__(self, carry, x):
            self.seen = nnx.Cache(x)
            return super().__call__(carry, x)

    with pytest.raises(ValueError, match="must not add or remove variables"):
        remat.RNN(cell(Adding), slots=3)(inputs())


class LinenDropoutCell(nn.RNNCellBase):
    features: int = H

    @nn.compact
    def __call__(self, carry, x):
        x = nn.Dropout(0.4, deterministic=False)(x)
        total = self.variable("statistics", "total", lambda: jnp.zeros((), jnp.float64))
        total.value = total.value + x.mean()
        return nn.GRUCell(self.features, param_dtype=jnp.float64)(carry, x + total.value)

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], self.features), jnp.float64)

    @property
    def num_feature_axes(self):
        return 1


@pytest.mark.parametrize("call", CALLS[1:5:2] + CALLS[2:3], ids=str)
def test_linen_options(call):
    x = inputs(call.get("time_major", False))
    cell = nn.OptimizedLSTMCell(H, param_dtype=jnp.float64)
    how = {"budget": "min"} if call is CALLS[3] else {"slots": 3}
    flaxs, ours = nn.RNN(cell), remat.linen.RNN(cell, **how)
    init = lambda model: quick(lambda key, x: model.init(key, x, **call))(jax.random.key(0), x)
    variables = init(flaxs)
    close(init(ours), variables)

    def gradient(model):
        def loss(variables, x):
            out = model.apply(variables, x, **call)
            return sum(
                (y**2 * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum() for y in jax.tree.leaves(out)
            )

        return quick(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)

    close(gradient(ours), gradient(flaxs))


@pytest.mark.parametrize("split", [True, False])
def test_linen_dropout_and_state(split):
    """The same masks as Flax's, and carried variables."""
    options = {"variable_carry": "statistics", "split_rngs": {"params": False, "dropout": split}}
    flaxs, ours = (
        make(LinenDropoutCell(), **options) for make in (nn.RNN, functools.partial(remat.linen.RNN, slots=3))
    )
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = flaxs.cell.init(rngs, jnp.zeros((B, H)), inputs()[:, 0])
    variables = {name: {"cell": values} for name, values in variables.items()}

    def gradient(model):
        def loss(params):
            merged = {**variables, "params": params}
            y, state = model.apply(merged, inputs(), rngs={"dropout": jax.random.key(2)}, mutable=["statistics"])
            return (y**2).sum(), state

        return quick(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    close(gradient(ours), gradient(flaxs))


def test_linen_inside_another_module():
    class Model(nn.Module):
        rnn: type

        @nn.compact
        def __call__(self, x):
            cell = nn.GRUCell(H, param_dtype=jnp.float64)
            return nn.Dense(2, param_dtype=jnp.float64)(self.rnn(cell, name="rnn")(x))

    flaxs, ours = Model(nn.RNN), Model(functools.partial(remat.linen.RNN, budget="min"))
    variables = quick(flaxs.init)(jax.random.key(0), inputs())
    run = lambda model: quick(model.apply)(variables, inputs())
    np.testing.assert_allclose(run(ours), run(flaxs), rtol=1e-12)
