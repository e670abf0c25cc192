"""Small models of many kinds, as people write them: each a function, and its arguments."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

BATCH, TOKENS, WIDTH, VOCABULARY = 4, 32, 32, 128


def initialised(model, *args):
    """The types of a model's variables: nothing of it is ever run."""
    return jax.eval_shape(lambda key, x: model.init(key, x, *args[1:]), jax.random.key(0), args[0])


def linen_mlp():
    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = nn.gelu(nn.Dense(128)(x))
            return nn.Dense(10)(x)

    model, x = MLP(), jnp.ones((256, 64))
    params = initialised(model, x)

    def loss(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    return loss, (params, x)


class ConvBlock(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        return nn.relu(nn.BatchNorm(use_running_average=not train)(x))


def linen_cnn():
    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            for features in (16, 32):
                x = nn.max_pool(ConvBlock(features)(x, train), (2, 2), (2, 2))
            return nn.Dense(10)(x.mean((1, 2)))

    model, images = CNN(), jnp.ones((8, 16, 16, 3))
    variables = initialised(model, images, False)
    optimizer = optax.sgd(0.1)

    def step(variables, state, images, labels):
        def loss(params):
            out, updates = model.apply({**variables, "params": params}, images, True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean(), updates

        (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        changes, state = optimizer.update(grads, state)
        return {"params": optax.apply_updates(variables["params"], changes), **updates}, state, value

    state = jax.eval_shape(optimizer.init, variables["params"])
    return jax.jit(step, donate_argnums=(0, 1)), (variables, state, images, jnp.zeros(8, jnp.int32))


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.DenseGeneral((4, x.shape[-1] // 4), name=name)(x) for name in ("query", "key", "value"))
        weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(jnp.einsum("bhqk,bkhd->bqhd", weights, v))


class FeedForward(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1], name="down")(nn.gelu(nn.Dense(4 * x.shape[-1], name="up")(x)))


class Block(nn.Module):
    feed_forward: type = FeedForward

    @nn.compact
    def __call__(self, x):
        x = x + Attention(name="attention")(nn.LayerNorm()(x))
        return x + self.feed_forward(name="mlp")(nn.LayerNorm()(x))


def language_model(block=Block, layers=2, scan=False, vocabulary=VOCABULARY):
    """A Transformer of Linen and its loss."""

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(vocabulary, WIDTH)(tokens)
            if scan:
                stack = nn.scan(
                    lambda block, x, _: (block(x), None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=layers,
                )
                x, _ = stack(block(name="layers"), x, None)
            else:
                for index in range(layers):
                    x = block(name=f"layers_{index}")(x)
            return nn.Dense(vocabulary, use_bias=False, name="head")(nn.LayerNorm()(x))

    model, tokens = Transformer(), jnp.zeros((BATCH, TOKENS), jnp.int32)
    params = initialised(model, tokens)

    def loss(params, tokens):
        logits = model.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return loss, (params, tokens)


def linen_transformer():
    return language_model()


def linen_scan():
    return language_model(layers=4, scan=True)


def linen_remat():
    return language_model(block=nn.remat(Block), layers=3)


class NnxAttention(nnx.Module):
    def __init__(self, rngs):
        self.projections = nnx.Dict({name: nnx.Linear(WIDTH, WIDTH, rngs=rngs) for name in ("query", "key", "value")})
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        heads = lambda name: self.projections[name](x).reshape(*x.shape[:-1], 4, -1)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads("query"), heads("key")))
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, heads("value")).reshape(x.shape))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.attention = nnx.LayerNorm(WIDTH, rngs=rngs), NnxAttention(rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.drop(self.down(jax.nn.gelu(self.up(x))))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


def nnx_transformer():
    model = NnxTransformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, jnp.zeros((BATCH, TOKENS), jnp.int32))


def attention(w, x):
    q, k, v = (jnp.einsum("btd,dhf->bthf", x, w[name]) for name in "qkv")
    scores = jnp.einsum("bqhf,bkhf->bhqk", q, k)
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    return jnp.einsum("bhqk,bkhf,hfd->bqd", jax.nn.softmax(scores), v, w["o"])


def feed_forward(w, x):
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def norm(scale, x):
    return x * scale * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def layer(w, x):
    x = x + attention(w, norm(w["norm1"], x))
    return x + feed_forward(w, norm(w["norm2"], x))


def llama(checkpoint=jax.checkpoint, layers=4):
    shapes = dict.fromkeys("qkv", (WIDTH, 4, WIDTH // 4)) | {"o": (4, WIDTH // 4, WIDTH)}
    shapes |= {"gate": (WIDTH, 96), "up": (WIDTH, 96), "down": (96, WIDTH), "norm1": (WIDTH,), "norm2": (WIDTH,)}
    weights = {name: jnp.ones((layers, *shape)) for name, shape in shapes.items()}
    embedding, tokens = jnp.ones((VOCABULARY, WIDTH)), jnp.zeros((BATCH, TOKENS), jnp.int32)

    def loss(weights, embedding, tokens):
        x = embedding[tokens]
        x, _ = jax.lax.scan(lambda x, w: (checkpoint(layer)(w, x), None), x, weights)
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ embedding.T), tokens[..., None], -1).mean()

    return loss, (weights, embedding, tokens)


def rnn():
    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.RNN(nn.LSTMCell(64))(x))

    model, x = Tagger(), jnp.ones((8, 40, 16))
    params = initialised(model, x)

    def loss(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    return loss, (params, x)


def unet():
    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            kept = []
            for features in (8, 16):
                x = nn.silu(nn.GroupNorm(4)(nn.Conv(features, (3, 3))(x)))
                kept.append(x)
                x = nn.max_pool(x, (2, 2), (2, 2))
            x = nn.silu(nn.Conv(32, (3, 3))(x))
            for features in (16, 8):
                x = nn.ConvTranspose(features, (2, 2), (2, 2))(x)
                x = nn.silu(nn.Conv(features, (3, 3))(jnp.concatenate([x, kept.pop()], -1)))
            return nn.Conv(3, (1, 1))(x)

    model, images = UNet(), jnp.ones((4, 16, 16, 3))
    params = initialised(model, images)

    def loss(params, images):
        return jnp.mean((model.apply(params, images) - images) ** 2)

    return loss, (params, images)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=[])
@dataclasses.dataclass
class Linear:
    w: jax.Array
    b: jax.Array

    def __call__(self, x):
        return x @ self.w + self.b


@functools.partial(jax.tree_util.register_dataclass, data_fields=["first", "second"], meta_fields=[])
@dataclasses.dataclass
class Residual:
    first: Linear
    second: Linear

    def __call__(self, x):
        return x + self.second(jax.nn.gelu(self.first(x)))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["blocks"], meta_fields=[])
@dataclasses.dataclass
class Net:
    blocks: list

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def pytree(blocks=3):
    """A model that is a pytree of plain classes, as in Equinox."""
    linear = lambda a, b: Linear(jnp.ones((a, b)), jnp.ones(b))
    net = Net([Residual(linear(32, 128), linear(128, 32)) for _ in range(blocks)])

    def loss(net, x):
        return jnp.mean(net(x) ** 2)

    return loss, (net, jnp.ones((128, 32)))


class Experts(nn.Module):
    """Each token goes to one expert, which has room for a share of them."""

    experts: int = 4

    @nn.compact
    def __call__(self, x):
        shape, width = x.shape, x.shape[-1]
        x = x.reshape(-1, width)
        gates = nn.softmax(nn.Dense(self.experts, name="router")(x))
        places = x.shape[0] // 2
        chosen = jax.nn.one_hot(gates.argmax(-1), self.experts)
        place = (jnp.cumsum(chosen, 0) * chosen).sum(-1).astype(jnp.int32) - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(place, places)[:, None]
        w_in = self.param("w_in", nn.initializers.normal(), (self.experts, width, 2 * width))
        w_out = self.param("w_out", nn.initializers.normal(), (self.experts, 2 * width, width))
        h = nn.relu(jnp.einsum("tec,td,edf->ecf", dispatch, x, w_in))
        out = jnp.einsum("ecf,efd,tec->td", h, w_out, dispatch * gates[..., None])
        return out.reshape(shape)


def mixture():
    return language_model(block=functools.partial(Block, feed_forward=Experts))


MODELS = {
    f.__name__: f
    for f in (
        *(linen_mlp, linen_cnn, linen_transformer, linen_scan, linen_remat, nnx_transformer),
        *(llama, rnn, unet, pytree, mixture),
    )
}
