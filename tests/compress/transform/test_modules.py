"""`compressed` NNX and Linen modules: same variables, same updates, same dropout, gradients within the codec's error."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax import compressed
from memjax.compress import Cast, ChannelQuantized, ErrorBounded, GroupQuantized
from tests.compress.kept import measured_bytes
from tests.compress.networks import SIZE, LinenBlock, LinenNetwork, NNXNetwork, errors, images

EXACT = Cast(jnp.float32)
FOUR_BITS = ErrorBounded(2**-4, bits_per_value=4)


def nnx_step(module):
    """Loss, gradients, and the state afterwards: batch statistics and dropout's counters."""

    @nnx.jit
    def step(module, x):
        return nnx.value_and_grad(lambda module: jnp.mean(jnp.square(module(x, scale=1.5))))(module)

    loss, grads = step(module, images())
    return loss, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))


@functools.cache
def plain_nnx_step():
    return nnx_step(NNXNetwork(nnx.Rngs(0)))


@functools.cache
def plain_linen_step():
    return linen_step(LinenNetwork())


@pytest.mark.parametrize("where", [None, "conv", "blocks/*/norm", lambda path, module: isinstance(module, nnx.Dropout)])
def test_nnx_module_is_the_same(where):
    original = NNXNetwork(nnx.Rngs(0))
    module = compressed(original, EXACT, where=where)
    assert isinstance(module, NNXNetwork)
    chex.assert_trees_all_equal_structs(
        nnx.to_pure_dict(nnx.state(module)), nnx.to_pure_dict(nnx.state(NNXNetwork(nnx.Rngs(0))))
    )
    assert module.blocks[0].conv.kernel is original.blocks[0].conv.kernel
    want, got = plain_nnx_step(), nnx_step(module)
    chex.assert_trees_all_close(*jax.device_get((got[:2], want[:2])), rtol=1e-3, atol=1e-6)
    keys = lambda tree: jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
    )
    chex.assert_trees_all_close(*jax.device_get((keys(got[2]), keys(want[2]))), rtol=1e-5, atol=1e-6)


def test_nnx_module_saves_memory_and_keeps_its_gradients():
    def gradient(module):
        graph, state = nnx.split(module)
        return jax.grad(lambda s: jnp.mean(nnx.merge(graph, s, copy=True)(images())), allow_int=True), state

    kept = {}
    for name, codec in (("plain", None), ("all", FOUR_BITS)):
        module = NNXNetwork(nnx.Rngs(0))
        f, state = gradient(module if codec is None else compressed(module, codec))
        kept[name] = measured_bytes(f, state)
    # Of each block its input and its convolution's output, and the masks of ReLU and dropout; an index.
    assert kept["all"] <= 2 * (2 * (SIZE // 2 + SIZE // 113) + 2 * SIZE // 8) + SIZE // 4 + 4096
    assert kept["plain"] > 7 * kept["all"]
    rounded = nnx_step(compressed(NNXNetwork(nnx.Rngs(0)), ErrorBounded(2**-9, bits_per_value=28)))
    exact = plain_nnx_step()
    assert 0 < max(errors(rounded[1], exact[1])) < 0.01
    np.testing.assert_allclose(rounded[0], exact[0], rtol=1e-5)


@pytest.mark.parametrize(("network", "where"), [("nnx", "blocks/*"), ("linen", "conv")])
def test_smallest_of_modules(network, where):
    """Codes of two bits change gradients a lot."""
    for smallest, least, most in ((SIZE, 0.3, 10), (SIZE + 1, 0, 1e-5)):
        wrap = functools.partial(compressed, codec=GroupQuantized(2), where=where, smallest=smallest)
        if network == "nnx":
            own, exact = nnx_step(wrap(NNXNetwork(nnx.Rngs(0))))[1], plain_nnx_step()[1]
        else:
            own, exact = linen_step(wrap(LinenNetwork()))[3], plain_linen_step()[3]
        assert least <= max(errors(own, exact)) <= most


def test_what_convolutions_read_and_the_rest_through_different_codecs():
    def kept(module):
        graph, state = nnx.split(module)
        f = jax.jit(jax.grad(lambda s: jnp.mean(nnx.merge(graph, s, copy=True)(images())), allow_int=True))
        return measured_bytes(f, state)

    convs = compressed(NNXNetwork(nnx.Rngs(0)), ErrorBounded(2**-9, bits_per_value=16), where="conv")
    both = compressed(convs, ChannelQuantized(4))
    # Two batch norms' inputs, float32, become four bits each.
    assert kept(convs) - kept(both) == 2 * (4 * SIZE - SIZE // 2 - 16 * 8)
    assert 0.02 < max(errors(nnx_step(both)[1], plain_nnx_step()[1])) < 0.3


def test_nnx_where_that_matches_nothing():
    with pytest.raises(ValueError, match=r"where must be a match for one of the submodules \['blocks', 'blocks/0',"):
        compressed(NNXNetwork(nnx.Rngs(0)), EXACT, where="layers/*")


def test_nnx_optimizer_sees_the_same_parameters():
    module = NNXNetwork(nnx.Rngs(0))
    wrapped = compressed(module, EXACT)
    wrapped.blocks[0].conv.kernel[...] = jnp.zeros((3, 3, 16, 16))
    assert (module.blocks[0].conv.kernel[...] == 0).all()


def linen_step(module):
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(lambda rngs: module.init(rngs, images(), True))(rngs)

    @jax.jit
    def step(variables):
        def loss(params):
            full = {"params": params, "batch_stats": variables["batch_stats"]}
            out, updates = module.apply(
                full, images(), True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(3)}
            )
            return jnp.mean(jnp.square(out)), updates

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    (loss, updates), grads = step(variables)
    return variables, loss, updates, grads


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: compressed(LinenNetwork(), EXACT),
        lambda: LinenNetwork(wrap=lambda block: compressed(block, EXACT)),
        lambda: compressed(LinenNetwork(), EXACT, where="conv"),
        lambda: compressed(LinenNetwork(), EXACT, where="LinenBlock_1/*"),
        lambda: nn.Sequential([compressed(LinenNetwork(), EXACT)]).layers[0],
    ],
    ids=["whole", "inside a module", "conv", "pattern", "field"],
)
def test_linen_module_is_the_same(wrap):
    module = wrap()
    assert isinstance(module, LinenNetwork)
    chex.assert_trees_all_close(*map(jax.device_get, (linen_step(module), plain_linen_step())), rtol=1e-3, atol=1e-6)


def test_linen_where_that_matches_nothing():
    with pytest.raises(
        ValueError,
        match=r"where must be a match for something .* got 'Dense_\*': .* scopes of the function are \['LinenNetwork",
    ):
        linen_step(compressed(LinenNetwork(), EXACT, where="Dense_*"))


def test_linen_evaluation_without_dropout():
    x = images()
    block = LinenBlock()
    wrapped = compressed(LinenBlock(), EXACT)

    @jax.jit
    def both(key, x):
        variables = block.init(key, x, False)
        return [module.apply(variables, x, False) for module in (wrapped, block)]

    np.testing.assert_allclose(*both(jax.random.key(0), x), rtol=1e-5, atol=1e-6)


WIDTH = 64


class NNXParts(nnx.Module):
    def __init__(self, rngs):
        linear = lambda: nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.encoder = nnx.Sequential(linear(), nnx.gelu, linear(), nnx.gelu)
        self.heads = nnx.data({"one": nnx.Sequential(nnx.gelu, linear(), nnx.gelu)})
        self.drop = nnx.Dropout(0.5)

    def encode(self, x):
        return self.encoder(x)

    def table(self, size):
        self.positions = nnx.Param(jnp.ones(size))

    def __call__(self, x, rngs=None):
        return self.drop(self.encode(x), rngs=rngs)


@functools.cache
def nnx_gradient(call):
    return nnx.jit(lambda module, x: jax.tree.leaves(nnx.grad(lambda module: jnp.mean(call(module, x) ** 2))(module)))


@functools.cache
def parts():
    return NNXParts(nnx.Rngs(0))


PARTS_INPUT = np.random.default_rng(1).normal(size=(512, WIDTH)).astype(np.float32)


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda m, x: m.encode(x), None),
        (lambda m, x: m.encode(x), "encoder"),
        (lambda m, x: m.encoder(x), None),
        (lambda m, x: m.encoder(x), "encoder"),
        (lambda m, x: m.heads["one"](m.encoder(x)), None),
        (lambda m, x: m.heads["one"](m.encoder(x)), "encoder"),
        (lambda m, x: nnx.jit(lambda m, x: m.encode(x))(m, x), None),
    ],
    ids=["method", "method, where", "submodule", "submodule, where", "in a dict", "in a dict, where", "jit"],
)
def test_methods_and_submodules_of_nnx_modules_are_compressed(call, where):
    module, x = parts(), PARTS_INPUT
    kept = lambda m: measured_bytes(nnx_gradient(call), m, x)
    small = compressed(module, ChannelQuantized(4), where=where)
    assert kept(small) < 0.75 * kept(module)
    assert 0.003 < max(errors(nnx_gradient(call)(small, x), nnx_gradient(call)(module, x))) < 0.3


def test_what_a_compressed_nnx_call_calls_itself_is_not_compressed_once_more():
    inside, x = compressed(NNXParts(nnx.Rngs(0)), ChannelQuantized(4)), PARTS_INPUT
    alone = nnx_gradient(lambda m, x: m.encode(x))(inside, x)
    for got, want in zip(nnx_gradient(lambda m, x: m(x))(eval_mode(inside), x), alone, strict=True):
        np.testing.assert_array_equal(got, want)


def eval_mode(module):
    module.eval()
    return module


def test_nnx_methods_that_set_something_up_and_random_streams_that_are_given():
    module, x = NNXParts(nnx.Rngs(0)), np.ones((4, WIDTH), np.float32)
    small, rngs, own = compressed(module, EXACT), nnx.Rngs(0), nnx.Rngs(0)
    small.table(3)
    assert small.positions.shape == (3,)
    small.heads["two"] = module.encoder
    assert "two" not in module.heads
    for _ in range(2):  # other values are dropped the second time
        np.testing.assert_allclose(small(x, rngs=rngs), module(x, rngs=own), rtol=1e-5)
    assert rngs["default"].count[...] == own["default"].count[...] == 2


def test_conv_alone_where_a_part_has_none():
    small = compressed(NNXNetwork(nnx.Rngs(0)), FOUR_BITS, where="conv")
    drop = lambda m, x: m.blocks[0].norm(x)
    nnx_gradient(drop)(small, jnp.ones((2, 8, 8, 16)))
    with pytest.raises(ValueError, match="where must be a match for something that the backward pass reads"):
        nnx_gradient(lambda m, x: m(x))(compressed(NNXParts(nnx.Rngs(0)).encoder, where="conv"), jnp.ones((512, WIDTH)))


class LinenParts(nn.Module):
    width: int = WIDTH

    def setup(self):
        self.encoder = nn.Sequential([nn.Dense(self.width), nn.gelu, nn.Dense(self.width), nn.gelu])

    def encode(self, x):
        return self.encoder(x)

    @nn.nowrap
    def size(self):
        return self.width

    def __call__(self, x):
        return self.encode(x)


class LinenParent(nn.Module):
    part: type = LinenParts

    def setup(self):
        self.inner = self.part(WIDTH)

    def __call__(self, x):
        return self.inner.encode(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, v, x: m.apply(v, x),
        lambda m, v, x: m.apply(v, x, method="encode"),
        lambda m, v, x: m.apply(v, x, method=LinenParts.encode),
        lambda m, v, x: m.apply(v, x, method=lambda m, x: m.encoder(x)),
        lambda m, v, x: m.bind(v).encode(x),
        lambda m, v, x: m.bind(v).encoder(x),
        lambda m, v, x: LinenParent(type(m)).apply({"params": {"inner": v["params"]}}, x),
    ],
    ids=["call", "name", "method", "function", "bound", "submodule of bound", "in a module"],
)
def test_methods_of_linen_modules_are_compressed(call):
    check_linen_call(call, compressed(LinenParts(), ChannelQuantized(4)))


def check_linen_call(call, small):
    gradient = lambda m: jax.jit(jax.grad(lambda v: jnp.mean(call(m, v, PARTS_INPUT) ** 2)))
    kept = lambda m: measured_bytes(gradient(m), linen_variables())
    assert kept(small) < kept(LinenParts()) / 2
    assert 0.003 < max(errors(*(gradient(m)(linen_variables()) for m in (small, LinenParts())))) < 0.3


@functools.cache
def linen_variables():
    return jax.jit(LinenParts().init)(jax.random.key(0), PARTS_INPUT)


def test_classes_of_linen_modules_are_compressed():
    small = compressed(LinenParts, ChannelQuantized(4))(width=WIDTH)
    assert isinstance(small, LinenParts)
    assert small.size() == WIDTH
    chex.assert_trees_all_equal(
        *jax.device_get((jax.jit(small.init)(jax.random.key(0), PARTS_INPUT), linen_variables()))
    )
    check_linen_call(lambda m, v, x: m.bind(v).encode(x), small)


def test_submodules_read_from_a_bound_linen_module_are_compressed_and_leave_it_as_it_is():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(nn.Dense(64)(jnp.sin(x)))

    class Net(nn.Module):
        field: nn.Module

        def setup(self):
            self.layers = [Layer(), Layer()]

        def __call__(self, x):
            return self.layers[1](self.layers[0](self.field(x)))

    x, net = PARTS_INPUT, Net(Layer())
    variables = jax.jit(net.init)(jax.random.key(1), x)
    small = compressed(net)

    def gradient_and_value(f, m):
        def loss(v):
            value = f(m.bind(v))
            return jnp.mean(value**2), value

        return jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(variables))

    for part in (lambda m: m.field(x), lambda m: m.layers[1](x), lambda m: (m.layers, m.field, m(x))[-1]):
        (got, value), (want, exact) = (gradient_and_value(part, m) for m in (small, net))
        np.testing.assert_array_equal(value, exact)
        off = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), got, want)
        assert 0 < max(jax.tree.leaves(off)) < 1e-3
    chex.assert_trees_all_equal(got, gradient_and_value(lambda m: m(x), small)[0])
