"""`tiled` against the same function on whole sequences, in float64; what it keeps, in bytes; errors."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import memjax
from memjax.remat import tiled
from tests.remat.tiled.tiled_cases import DIM, EXAMPLES, LENGTH, close, feed_forward, gradients, normal, parameters


def both(f, *args):
    """Results and gradients."""
    return jax.jit(lambda *args: (f(*args), gradients(f, *args)))(*args)


@functools.cache
def whole(length=LENGTH):
    return both(feed_forward, parameters(), normal(9, EXAMPLES, length, DIM))


@pytest.mark.parametrize("tile", [None, 1, 5, LENGTH, 100])
def test_equals_the_function(x64, tile):
    p, x = parameters(), normal(9, EXAMPLES, LENGTH, DIM)
    close(both(tiled(feed_forward, (None, 1), 1, tile=tile), p, x), whole())


@settings(deadline=None, max_examples=10)
@given(length=st.integers(0, 20), tile=st.integers(1, 21), axis=st.integers(-2, 1))
def test_any_length_tile_and_axis(length, tile, axis):
    x = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    x = jax.device_put(np.repeat(np.take(x, [0], axis), length, axis))

    def f(x):
        return {"y": jnp.moveaxis(jnp.tanh(jnp.moveaxis(x, axis, 0)), 0, axis), "n": jnp.isfinite(x)}

    of = lambda f: lambda x: (f(x), jax.grad(lambda x: jnp.sum(f(x)["y"]))(x))
    out, expected = jax.device_get(jax.jit(lambda x: (of(tiled(f, axis, axis, tile=tile))(x), of(f)(x)))(x))
    chex.assert_trees_all_close(out, expected, rtol=1e-6)


def test_sums_are_added_up(x64):
    p, x, labels = (
        parameters(),
        normal(9, EXAMPLES, LENGTH, DIM),
        jnp.arange(EXAMPLES * LENGTH).reshape(EXAMPLES, -1) % DIM,
    )

    def loss(p, x, labels):
        logits = feed_forward(p, x)
        correct = jnp.argmax(logits, -1) == labels
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
        return {"loss": -0.5 * jnp.sum(chosen), "correct": jnp.sum(correct)}, logits

    f = tiled(loss, (None, 1, 1), (None, 1), tile=4)
    of_floats = lambda f: lambda p, x: (f(p, x, labels)[0]["loss"], f(p, x, labels)[1])
    results = lambda f: jax.jit(lambda p, x: (f(p, x, labels), gradients(of_floats(f), p, x)))(p, x)
    found, expected = results(f), results(loss)
    close(found, expected)
    assert found[0][0]["correct"].dtype == expected[0][0]["correct"].dtype


def test_sums_of_gradients_are_kept_in_float32_or_as_asked():
    x, w = jnp.ones((1, 1024, 1), jnp.bfloat16), jnp.ones((), jnp.bfloat16)
    f = lambda w, x: w * x

    def gradient(**options):
        run = tiled(f, (None, 1), 1, tile=1, **options)
        return jax.grad(lambda w: jnp.sum(run(w, x).astype(jnp.float32)))(w)

    assert gradient() == 1024
    assert gradient(sum_dtype=None) == 256  # where adding 1 changes nothing any more


@pytest.mark.parametrize("use", [lambda w, x: x @ w, lambda w, x: x @ w + x @ w[::-1, ::-1]], ids=["one", "two"])
def test_gradients_of_weights_are_rounded_once_for_all_tiles(use):
    """Products of small integers: their sums are exact in float32."""
    draw = lambda seed: np.random.default_rng(seed).integers(-8, 9, (1, 640, 4)).astype(jnp.bfloat16)
    x, ct = (jax.device_put(draw(seed)) for seed in range(2))
    w = jnp.zeros((4, 4), jnp.bfloat16)
    pulled = lambda f, w, x, ct: jax.vjp(lambda w: f(w, x), w)[1](ct)[0]
    exact = pulled(use, *(a.astype(jnp.float32) for a in (w, x, ct)))
    found = pulled(tiled(use, (None, 1), 1, tile=16), w, x, ct)
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


def test_what_it_closes_over_is_differentiated(x64):
    p, x = parameters(), normal(9, EXAMPLES, LENGTH, DIM)
    f = lambda p: tiled(lambda x: feed_forward(p, x), 1, 1, tile=5)(x)
    close(gradients(f, p), gradients(lambda p: feed_forward(p, x), p))


def test_positions_and_keys_are_arguments(x64):
    x, positions, keys = (
        normal(9, EXAMPLES, LENGTH, DIM),
        jnp.arange(LENGTH),
        jax.random.split(jax.random.key(0), LENGTH),
    )

    def rotate_and_drop(x, positions, keys, rate=0.5):
        angle = positions[:, None].astype(x.dtype) / 10 ** jnp.arange(DIM // 2, dtype=x.dtype)
        a, b = jnp.split(x, 2, -1)
        x = jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)
        drop = lambda row, key: jnp.where(jax.random.bernoulli(key, rate, row.shape), row, 0.0)
        return jax.vmap(drop, (1, 0), 1)(x, keys)

    on_x = lambda f: both(lambda x: f(x, positions, keys, rate=0.3), x)
    close(on_x(tiled(rotate_and_drop, (1, 0, 0), 1, tile=4)), on_x(rotate_and_drop))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_over_the_same_axis(x64, check_vma):
    p, x = parameters(), normal(9, EXAMPLES, 24, DIM)
    mesh = jax.make_mesh((4,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P(), P(None, "s")), "out_specs": P(None, "s"), "check_vma": check_vma}
    f = jax.shard_map(tiled(feed_forward, (None, 1), 1, tile=4), **specs)
    close(jax.jit(gradients, static_argnums=0)(f, p, x), whole(24)[1])


def test_a_gradient_inside_shard_map_meets_other_devices_once(x64):
    p, x = parameters(), normal(9, EXAMPLES, 24, DIM)
    mesh = jax.make_mesh((4,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    f = tiled(feed_forward, (None, 1), 1, tile=3)
    inside = jax.shard_map(
        lambda p, x: gradients(f, p, x), mesh=mesh, in_specs=(P(), P(None, "s")), out_specs=(P(), P(None, "s"))
    )
    close(jax.jit(inside)(p, x), whole(24)[1])
    loops = [eqn for eqn in _equations(jax.make_jaxpr(inside)(p, x).jaxpr) if eqn.primitive.name == "scan"]
    assert loops
    assert not any("psum" in eqn.primitive.name for loop in loops for eqn in _equations(loop.params["jaxpr"].jaxpr))


class LinenFeedForward(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(DIM)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))


class NnxFeedForward(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 16, rngs=rngs), nnx.Linear(16, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("is_class", [True, False])
def test_linen(is_class):
    x = normal(9, EXAMPLES, LENGTH, DIM)
    plain = LinenFeedForward()
    init = lambda module: jax.jit(module.init)(jax.random.key(0), x)
    variables = init(plain)
    module = tiled(LinenFeedForward, 1, 1, tile=5)() if is_class else tiled(plain, 1, 1, tile=5)
    assert isinstance(module, LinenFeedForward)
    chex.assert_trees_all_equal_shapes_and_dtypes(init(module), variables)
    on = lambda module: gradients(module.apply, variables, x)
    chex.assert_trees_all_close(*jax.device_get((on(module), on(plain))), rtol=1e-4, atol=1e-5)


def test_nnx():
    x, plain = normal(9, EXAMPLES, LENGTH, DIM), NnxFeedForward(nnx.Rngs(0))
    shares, of_class = tiled(plain, 1, 1, tile=5), tiled(NnxFeedForward, 1, 1, tile=5)(nnx.Rngs(0))
    assert isinstance(shares, NnxFeedForward)
    assert shares.up.kernel is plain.up.kernel
    on = lambda module: jax.tree.leaves(nnx.jit(nnx.grad(lambda module: jnp.sum(jnp.sin(module(x)))))(module))
    assert all(" while(" in jax.jit(module).lower(x).compile().as_text() for module in (shares, of_class))
    found, of_class, expected = jax.device_get((on(shares), on(of_class), on(plain)))
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(of_class, expected, rtol=1e-4, atol=1e-5)


def test_modules_that_change_their_variables_are_refused():
    x = normal(9, EXAMPLES, LENGTH, DIM)
    with pytest.raises(ValueError, match="f must not change its variables, got BatchNorm"):
        tiled(nnx.BatchNorm(DIM, rngs=nnx.Rngs(0)), 1, 1, tile=4)(x)
    with pytest.raises(ValueError, match=r"f must not mix positions.*made without the arguments.*random"):
        tiled(nn.Dropout(0.5, deterministic=False), 1, 1, tile=4).apply({}, x, rngs={"dropout": jax.random.key(0)})
    with pytest.raises(TypeError, match="arguments of a tiled Dropout must hold arrays, got a Rngs"):
        tiled(nnx.Dropout(0.5), 1, 1, tile=4)(x, rngs=nnx.Rngs(0))


def temp_bytes(f, *args):
    step = jax.jit(lambda *args: jax.vjp(f, *args[:-1])[1](args[-1]))
    compiled = step.lower(*args).compile(compiler_options=memjax.remat_compiler_options())
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_one_tile():
    """Beside arguments and results: a tile's work, gradients of parameters, and nothing for the argument's gradient."""
    p, x = parameters(64, 256), normal(9, 1, 4096, 64)
    plain = temp_bytes(feed_forward, p, x, x)
    run = temp_bytes(tiled(feed_forward, (None, 1), 1, tile=128), p, x, x)
    # What is kept and worked with is about 2 + 6 * 4 arrays like x; a tile has a 32nd of it.
    assert plain > 12 * x.nbytes
    assert run < 0.15 * plain
    assert memjax.measure(
        lambda p, x: gradients(tiled(feed_forward, (None, 1), 1, tile=128), p, x), p, x
    ).residual_bytes < (1.2 * (x.nbytes + sum(leaf.nbytes for leaf in p.values())))


def test_unrolled_layers_take_no_more_than_their_inputs():
    """Loops over copies of what they slice would: then six tiled layers take more than six whole ones."""
    p, x = parameters(64, 256), normal(9, 1, 4096, 64)

    def layers(f):
        def run(p, x):
            for _ in range(6):
                x = f(p, x)
            return x

        return run

    run = temp_bytes(layers(tiled(feed_forward, (None, 1), 1, tile=128)), p, x, x)
    # Five inputs of layers that are kept, the cotangent at work, a copy or two that the first and last loop make.
    assert run < 8.5 * x.nbytes
    assert run < 0.2 * temp_bytes(layers(feed_forward), p, x, x)


def test_what_the_program_made_is_written_over():
    """Rather than a copy of the argument, which lies on a mesh: of that, what the program makes knows nothing."""
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    x = jax.ShapeDtypeStruct((64, 4096), jnp.float32, sharding=jax.NamedSharding(mesh, P()))

    def f(x):
        made = jax.lax.fori_loop(0, 3, lambda i, a: jnp.sin(a + i.astype(a.dtype)), jnp.ones(x.shape, x.dtype))
        return tiled(lambda made, x: made + x, 1, 1, tile=128)(made, x)

    assert jax.jit(f).lower(x).compile().memory_analysis().temp_size_in_bytes < 0.1 * x.size * 4


def test_frozen_arguments_cost_no_product():
    p, x = parameters(), normal(9, EXAMPLES, LENGTH, DIM)
    f = tiled(feed_forward, (None, 1), 1, tile=LENGTH)
    products = lambda wrt: str(jax.make_jaxpr(jax.grad(lambda p, x: jnp.sum(f(p, x)), wrt))(p, x)).count("dot_general")
    assert products((0, 1)) - products(1) == 3


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for body in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _equations(getattr(body, "jaxpr", body))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_axes": (None,)}, "in_axes must be a tuple of one entry for each of the 2 arguments, got"),
        ({"in_axes": (None, 5)}, "in_axes must be axes of argument 1, an array of float32.*, got 5"),
        ({"in_axes": (None, "a")}, "in_axes must be integers and None, got 'a'"),
        ({"in_axes": (None, None)}, "in_axes must be an axis for at least one array"),
        ({"in_axes": (0, 1)}, "argument 1 must be 8 long along axis 1, as those before, got"),
        ({"out_axes": 2}, "out_axes must be the axes that hold positions .5 in a tile., .*got 2"),
        ({"out_axes": (1, 1)}, "out_axes must be a pytree prefix"),
        ({"tile": 0}, "tile must be a number of positions of at least 1, got 0"),
        ({"tile": 2.5}, "tile must be a number of positions of at least 1, got 2.5"),
        ({"sum_dtype": "int32"}, "sum_dtype must be a floating-point dtype, got 'int32': or None"),
        ({"check": 3}, "check must be True or False, got 3"),
    ],
)
def test_errors(options, message):
    w, x = normal(1, DIM, DIM), normal(9, EXAMPLES, LENGTH, DIM)
    with pytest.raises((ValueError, TypeError), match=message):
        tiled(lambda w, x: x @ w, **{"in_axes": (None, 1), "out_axes": 1, "tile": 5, **options})(w, x)


def test_other_errors():
    with pytest.raises(TypeError, match="f must be a function, got 3"):
        tiled(3)
    with pytest.raises(TypeError, match=r"argument 0 must be an array, as in_axes gives it an axis, got 1\.0"):
        tiled(jnp.sin)(1.0)
    with pytest.raises(TypeError, match="cannot be differentiated in forward mode"):
        jax.jvp(tiled(jnp.sin), (jnp.ones(3),), (jnp.ones(3),))
