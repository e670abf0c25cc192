"""`remat.Chain` and `remat.linen.Chain` against Flax's Sequential, in float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from memjax import remat
from memjax.remat import ChainSchedule
from tests.remat.chain.chain_cases import close

WIDTH = 6
SCHEDULE = ChainSchedule((0, (1, (2,), 3), 4, 5), 0.0, 0, 0.0, 0)
MEMORY = {"budget": {"budget": "1MiB"}, "schedule": {"schedule": SCHEDULE}}


@pytest.fixture(autouse=True)
def _double(x64):
    with jax.numpy_dtype_promotion("standard"):  # which Linen's normalisation needs in float64
        yield


def x():
    return jax.random.normal(jax.random.key(0), (8, WIDTH), jnp.float64)


class Block(nnx.Module):
    """Residual, with running statistics and dropout."""

    def __init__(self, rngs):
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH, jnp.float64))
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        mean = x.mean(0)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * mean
        return x + self.dropout(self.down(jnp.tanh(self.up(x - mean)))) + self.mean[...]


def layers():
    rngs = nnx.Rngs(0, dropout=1)
    twice = lambda x: (x, 2 * x)  # a tuple is the next layer's arguments
    return [Block(rngs), Block(rngs), twice, lambda x, y: x * jnp.sin(y), Block(rngs), Block(rngs)]


@pytest.mark.parametrize("memory", MEMORY)
def test_nnx_is_sequential(memory):
    """Two steps: outputs, gradients, running statistics, and dropout that differs between them."""

    def run(model):
        @nnx.jit
        def step(model, x):
            return nnx.value_and_grad(lambda model, x: (model(x) ** 2).sum(), argnums=(0, 1))(model, x)

        steps = [step(model, x()) for _ in range(2)]
        return steps, nnx.state(model, nnx.BatchStat), nnx.state(model, nnx.RngCount)

    found = run(remat.Chain(*layers(), **MEMORY[memory]))
    close(found, run(nnx.Sequential(*layers())))
    assert float(found[0][0][0]) != float(found[0][1][0])


def test_nnx_evaluation_and_checkpoints():
    ours, flaxs = remat.Chain(*layers(), budget="1MiB"), nnx.Sequential(*layers())
    assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(flaxs))
    nnx.update(ours, jax.tree.map(lambda leaf: leaf * 1.5, nnx.state(flaxs, nnx.Param)))
    nnx.update(flaxs, nnx.state(ours, nnx.Param))
    ours.eval()
    flaxs.eval()
    run = nnx.jit(lambda model, x: model(x))
    close(run(ours, x()), run(flaxs, x()))


@pytest.mark.smoke
def test_nnx_tied_parameters_add_their_gradients():
    linear = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    gradient = nnx.jit(nnx.grad(lambda model: (model(x()) ** 2).sum()))
    ours = gradient(remat.Chain(linear, jnp.tanh, linear, budget="1MiB"))
    close(jax.tree.leaves(ours), jax.tree.leaves(gradient(nnx.Sequential(linear, jnp.tanh, linear))))


def test_nnx_shared_state_is_refused():
    block = Block(nnx.Rngs(0))
    with pytest.raises(ValueError, match="layers share state other than parameters"):
        remat.Chain(block, block, budget="1MiB")(x())


@pytest.mark.parametrize("options", [{}, {"budget": 1, "schedule": SCHEDULE}])
def test_memory_must_be_given_once(options):
    with pytest.raises(ValueError, match="exactly one of budget and schedule"):
        remat.Chain(jnp.tanh, **options)
    with pytest.raises(ValueError, match="exactly one of budget and schedule"):
        remat.linen.Chain([jnp.tanh], **options).apply({}, x())


class LinenBlock(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False, param_dtype=jnp.float64)(x)
        h = nn.Dense(3 * WIDTH, param_dtype=jnp.float64)(h)
        h = nn.Dense(WIDTH, param_dtype=jnp.float64)(jnp.tanh(h))
        return x + nn.Dropout(self.dropout, deterministic=False)(h)


class LinenModel(nn.Module):
    sequential: type
    options: dict
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        first, second, third, fourth = [LinenBlock(self.dropout) for _ in range(4)]
        layers = [first, second, lambda x: (x, 2 * x), lambda x, y: x * jnp.sin(y), third, fourth]
        model = self.sequential(layers, **self.options)
        return nn.Dense(2, param_dtype=jnp.float64)(model(x))


def init(model):
    return jax.jit(model.init)(jax.random.key(0), x())


def linen_gradient(model, variables):
    def loss(params):
        rngs = {"dropout": jax.random.key(2)}
        y, state = model.apply({**variables, "params": params}, x(), rngs=rngs, mutable=["batch_stats"])
        return (y**2).sum(), state

    options = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=options)(variables["params"])


def test_linen_is_sequential():
    ours, flaxs = LinenModel(remat.linen.Chain, MEMORY["schedule"]), LinenModel(nn.Sequential, {})
    variables = init(flaxs)
    close(init(ours), variables)
    close(linen_gradient(ours, variables), linen_gradient(flaxs, variables))


def test_linen_layers_as_attributes():
    layers = [nn.Dense(WIDTH, param_dtype=jnp.float64), jnp.tanh, nn.Dense(2, param_dtype=jnp.float64)]
    ours, flaxs = remat.linen.Chain(layers, budget="1MiB"), nn.Sequential(layers)
    variables = init(flaxs)
    close(init(ours), variables)
    close(linen_gradient(ours, variables), linen_gradient(flaxs, variables))


def test_linen_dropout_is_the_same_in_recomputation():
    """A function of the masks is the same whether blocks are kept or run again, and changes with the key."""
    kept = LinenModel(remat.linen.Chain, MEMORY["budget"], dropout=0.5)
    again = LinenModel(remat.linen.Chain, MEMORY["schedule"], dropout=0.5)
    variables = jax.jit(kept.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x())
    close(linen_gradient(kept, variables), linen_gradient(again, variables))
    run = jax.jit(lambda key: kept.apply(variables, x(), rngs={"dropout": key}, mutable=["batch_stats"])[0])
    outputs = [run(jax.random.key(seed)) for seed in (2, 3)]
    assert float(jnp.abs(outputs[0] - outputs[1]).max()) > 1e-3
