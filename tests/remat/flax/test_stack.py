"""Stacks of equal layers: loops over them are the layers one by one, and what differs is named."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from memjax import remat

WIDTH = 6


class Block(nnx.Module):
    def __init__(self, seed, hidden=8, rate=0.0):
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(WIDTH, hidden, param_dtype=jnp.result_type(float), rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, param_dtype=jnp.result_type(float), rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(jnp.tanh(self.up(x))))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(8)(x)))


def x():
    return jax.random.normal(jax.random.key(0), (3, WIDTH), jnp.result_type(float))


@pytest.mark.parametrize("scan", [jax.lax.scan, lambda *args: remat.scan(*args, slots=2)])
def test_a_loop_over_a_stack_of_modules_is_one_after_the_other(x64, scan):
    layers = [Block(i) for i in range(4)]
    stacked = remat.stack_layers(layers)
    assert isinstance(stacked, Block)
    assert stacked.up.kernel.shape == (4, WIDTH, 8)

    def loss(apply, module):
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        of_params = lambda params: (apply(nnx.merge(graph, params, rest, copy=True), x()) ** 2).sum()
        return jax.jit(jax.value_and_grad(of_params))(params)

    def one_by_one(model, x):
        for layer in model.layers:
            x = layer(x)
        return x

    value, grad = loss(lambda layers, x: scan(lambda x, layer: (layer(x), None), x, layers)[0], stacked)
    expected, grads = loss(one_by_one, nnx.Sequential(*layers))
    chex.assert_trees_all_close(value, expected, rtol=1e-10)
    of_layers = [nnx.to_pure_dict(grads)["layers"][i] for i in range(4)]
    chex.assert_trees_all_close(nnx.to_pure_dict(grad), remat.stack_layers(of_layers), rtol=1e-10, atol=1e-12)


def test_linen_variables():
    block = LinenBlock()
    layers = [block.init(jax.random.key(i), x()) for i in range(3)]
    found, _ = jax.lax.scan(lambda x, p: (block.apply(p, x), None), x(), remat.stack_layers(layers))
    expected = x()
    for layer in layers:
        expected = block.apply(layer, expected)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


def test_unstacking_gives_the_layers_back():
    """Keys and counts of random numbers too, and shapes alone."""
    layers = [Block(i, rate=0.5) for i in range(3)]
    again = remat.unstack_layers(remat.stack_layers(layers))
    assert jax.tree.structure(again) == jax.tree.structure(layers)
    for ours, given in zip(jax.tree.leaves(again), jax.tree.leaves(layers), strict=True):
        assert ours.dtype == jnp.asarray(given).dtype
        chex.assert_trees_all_equal(jax.device_get(ours), jax.device_get(jnp.asarray(given)))
    shapes = jax.eval_shape(remat.stack_layers, layers)
    assert shapes.down.bias.get_value().shape == (3, WIDTH)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Block(1, hidden=9), r"layers\[1\]\.down must be a Linear with in_features = 8, as layers\[0\]\.down"),
        (lambda: Block(1, rate=0.1), r"layers\[1\]\.dropout must be a Dropout with rate = 0\.0,.* rate = 0\.1: stack"),
        (lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), r"layers\[1\] must be Block, as layers\[0\], got Linear"),
    ],
)
def test_modules_that_differ_are_named(other, message):
    with pytest.raises(ValueError, match=message):
        remat.stack_layers([Block(0), other()])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "layers must be at least one"),
        (
            [{"a": jnp.ones(2)}, {"a": jnp.ones(3)}],
            r"layers\[1\]\['a'\] must be float32\[2\], as layers\[0\]\['a'\], got float32\[3\]",
        ),
        (
            [{"a": [jnp.ones(2)]}, {"a": [jnp.ones(2, int)]}],
            r"layers\[1\]\['a'\]\[0\] must be float32\[2\].*got int32\[2\]",
        ),
        ([{"a": 1.0}] * 2 + [{"b": 1.0}], r"layers\[2\] must be a dict of \['a'\], as layers\[0\], got one of \['b'\]"),
        ([[1.0], [1.0, 2.0]], r"layers\[1\] must be of length 1, as layers\[0\], got one of 2"),
    ],
)
def test_pytrees_that_differ_are_named(layers, message):
    with pytest.raises(ValueError, match=message):
        remat.stack_layers(layers)


def test_what_is_no_stack_is_refused():
    with pytest.raises(TypeError, match="layers must be a sequence"):
        remat.stack_layers(Block(0))
    for layers, place in (([None], 0), ([()] * 2, 0), ([{"a": 1.0}, None], 1)):
        with pytest.raises(
            ValueError, match=rf"layers\[{place}\] must be a module or pytree with arrays, got .*: leave out"
        ):
            remat.stack_layers(layers)
    with pytest.raises(TypeError, match=r"layers\[0\]\['a'\] must be an array or a number, got 'relu': keep static"):
        remat.stack_layers([{"a": "relu"}] * 2)
    with pytest.raises(ValueError, match=r"stacked\['b'\] must be of 2 layers, as stacked\['a'\], got"):
        remat.unstack_layers({"a": jnp.ones((2, 3)), "b": jnp.ones((3, 2))})
    with pytest.raises(ValueError, match=r"stacked\['a'\] must be an array with a leading layer axis, got 1.0"):
        remat.unstack_layers({"a": 1.0})
    with pytest.raises(ValueError, match="stacked must be a module or pytree with arrays"):
        remat.unstack_layers({})
