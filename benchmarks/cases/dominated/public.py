"""Networks that others published, their files unchanged, at sizes for a CPU.

They are in a folder with Flax's `examples` and Bonsai's `bonsai`, as for `benchmarks.public_models`.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import recurrent
from benchmarks.cases.dominated.network import Loss, Network, Tool, checkpointed, linen_checkpointed, split, within
from benchmarks.cases.public_models import public_module

_KEY = jax.random.key(0)
_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def vit(public: pathlib.Path) -> Network:
    models = public_module(public, "bonsai/models/vit/modeling.py")
    sizes = {"hidden_dim": 128, "mlp_dim": 512, "num_heads": 4, "num_layers": 3, "num_labels": 100}
    fixed = {"num_channels": 3, "attn_dropout_prob": 0.0, "dropout_prob": 0.0, "eps": 1e-12}
    config = models.ModelConfig(image_size=(96, 96), patch_size=(8, 8), **sizes, **fixed)
    model = models.ViTClassificationModel(config, rngs=nnx.Rngs(0))
    return _classifier(model, lambda model, x: model(x, rngs=None), 8, 96, models.TransformerEncoder)


def convnext(public: pathlib.Path) -> Network:
    models = public_module(public, "bonsai/models/convnext/modeling.py")
    config = models.ModelConfig((1, 1, 2, 1), (32, 64, 128, 256), 0.0, 100)
    model = models.ConvNeXt(config, rngs=nnx.Rngs(0))
    return _classifier(model, lambda model, x: model(x, rngs=None, train=True), 8, 96, models.Block)


def densenet(public: pathlib.Path) -> Network:
    models = public_module(public, "bonsai/models/densenet121/modeling.py")
    model = models.DenseNet(models.ModelConfig(100, [4, 6], 12), rngs=nnx.Rngs(0))
    return _classifier(model, lambda model, x: model(x), 8, 128, models.DenseBlock)


def unet(public: pathlib.Path) -> Network:
    models = public_module(public, "bonsai/models/unet/modeling.py")
    model = models.UNet(models.ModelConfig(3, 3, (4, 8, 16, 32, 64)), rngs=nnx.Rngs(0))
    return _autoencoder(model, 4, 64, models.DoubleConv)


def vae(public: pathlib.Path) -> Network:
    models = public_module(public, "bonsai/models/vae/modeling.py")
    model = models.VAE(models.ModelConfig((16, 32), 4, 8), rngs=nnx.Rngs(0))
    return _autoencoder(model, 2, 64, models.ResnetBlock)


def mamba(public: pathlib.Path) -> Network:
    models = public_module(public, "bonsai/models/mamba2/modeling.py")
    config = models.ModelConfig(
        vocab_size=2000, hidden_size=96, state_size=32, head_dim=32, chunk_size=64, num_hidden_layers=2
    )
    graph, params, rest = split(models.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)))
    loss = lambda params, tokens: nnx.merge(graph, params, rest)(tokens, labels=tokens)["loss"]
    tokens = jax.random.randint(_KEY, (4, 512), 0, config.vocab_size)
    return Network(loss, (params, tokens), _by_hand(loss, models.Mamba2Block))


def language_model(public: pathlib.Path) -> Network:
    models = public_module(public, "examples/lm1b/models.py")
    words, length = 4000, 256
    sizes = {"emb_dim": 128, "num_heads": 4, "num_layers": 2, "qkv_dim": 128, "mlp_dim": 512, "max_len": length}
    config = models.TransformerConfig(vocab_size=words, output_vocab_size=words, dropout_rate=0.0, **sizes)
    config = config.replace(attention_dropout_rate=0.0)
    tokens = jax.random.randint(_KEY, (4, length), 1, words)
    params = nn.meta.unbox(models.TransformerLM(config).init(_KEY, tokens)["params"])

    def loss(params: Any, tokens: Any) -> Any:
        logits = models.TransformerLM(config).apply({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    again = functools.partial(linen_checkpointed, models, "EncoderDecoder1DBlock")
    return Network(loss, (params, tokens), _in_linen(loss, again))


def resnet(public: pathlib.Path) -> Network:
    models = public_module(public, "examples/imagenet/models.py")
    sizes: Any = {"stage_sizes": [1, 1, 1], "num_filters": 16, "num_classes": 100, "dtype": jnp.float32}
    images, labels = jax.random.normal(_KEY, (16, 96, 96, 3)), jax.random.randint(_KEY, (16,), 0, 100)
    model = lambda: models.ResNet(block_cls=models.ResNetBlock, **sizes)
    variables = model().init(_KEY, images, train=False)

    def loss(params: Any, images: Any, labels: Any) -> Any:
        # Its batch norms average over the axis "batch": devices in Flax's training, of which there is one here.
        state = {"params": params, "batch_stats": variables["batch_stats"]}
        apply = lambda x: model().apply(state, x, mutable=["batch_stats"])[0]
        logits = jax.vmap(apply, axis_name="batch")(images[None])[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    again = functools.partial(linen_checkpointed, models, "ResNetBlock")
    return Network(loss, (variables["params"], images, labels), _in_linen(loss, again))


def graph_net(public: pathlib.Path) -> Network:
    """The GraphNet of Flax's ogbg example."""
    import jraph

    models = public_module(public, "examples/ogbg_molpcba/models.py")
    net = models.GraphNet(
        latent_size=48,
        num_mlp_layers=2,
        message_passing_steps=2,
        output_globals_size=16,
        dropout_rate=0.0,
        skip_connections=True,
        layer_norm=True,
        use_edge_model=True,
        deterministic=True,
    )
    graphs, nodes, edges = 16, 16, 80
    rng = np.random.default_rng(0)
    first = np.repeat(np.arange(graphs) * nodes, edges)
    ends = [jnp.asarray(rng.integers(nodes, size=graphs * edges) + first) for _ in range(2)]
    counts = jnp.full(graphs, nodes), jnp.full(graphs, edges)
    normal = lambda *shape: jax.random.normal(_KEY, shape)
    graph = jraph.GraphsTuple(
        normal(graphs * nodes, 9), normal(graphs * edges, 3), *ends, jnp.zeros((graphs, 1)), *counts
    )
    params = net.init(_KEY, graph)
    loss = lambda params, graph: jnp.mean(net.apply(params, graph).globals ** 2)
    return Network(loss, (params, graph), _in_linen(loss, functools.partial(linen_checkpointed, models, "MLP")))


def recurrent_ppo(public: pathlib.Path) -> Network:
    """The actor and critic of recurrent PPO, over a rollout."""
    keys = iter(jax.random.split(_KEY, 20))
    length, batch, seen, hidden, actions = 256, 16, 48, 96, 8
    shapes = {"embed": (seen, hidden), "wi": (hidden, 3 * hidden), "wh": (hidden, 3 * hidden)}
    shapes |= {"actor": (hidden, hidden), "policy": (hidden, actions), "critic": (hidden, hidden), "value": (hidden, 1)}
    params = {name: jax.random.normal(next(keys), shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    acted = jax.random.randint(next(keys), (length, batch), 0, actions)
    rollout = jax.random.normal(next(keys), (length, batch, seen)), acted, jax.random.normal(next(keys), acted.shape)
    chunks = {f"chunks of {size} steps": Tool(functools.partial(recurrent.by_hand, size)) for size in (8, 16, 64)}
    return Network(recurrent.plain, (params, rollout), chunks)


def neural_ode(public: pathlib.Path) -> Network:
    """A solve by diffrax, whose own checkpoints are the tool; the plain loop is bounded."""
    import diffrax

    from benchmarks import solve

    by = lambda adjoint: lambda params, y0: solve.loss(params, y0, adjoint, None)[0]
    own = lambda count: Tool(by(diffrax.RecursiveCheckpointAdjoint(checkpoints=count)))
    tools = {"RecursiveCheckpointAdjoint": own(None), "RecursiveCheckpointAdjoint, 16": own(16)}
    return Network(by(diffrax.DirectAdjoint()), solve.arguments(), tools)


def _by_hand(loss: Loss, *classes: type) -> dict[str, Tool]:
    return {
        "checkpoint of each block": Tool(within(functools.partial(checkpointed, *classes), loss)),
        "the same, products kept": Tool(within(functools.partial(checkpointed, *classes, policy=_DOTS), loss)),
    }


def _in_linen(loss: Loss, again: Callable[..., Any]) -> dict[str, Tool]:
    return {
        "checkpoint of each block": Tool(within(again, loss)),
        "the same, products kept": Tool(within(functools.partial(again, policy=_DOTS), loss)),
    }


def _classifier(model: Any, call: Callable[..., Any], batch: int, size: int, *classes: type) -> Network:
    graph, params, rest = split(model)

    def loss(params: Any, images: Any, labels: Any) -> Any:
        logits = call(nnx.merge(graph, params, rest, copy=True), images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    images, labels = jax.random.normal(_KEY, (batch, size, size, 3)), jax.random.randint(_KEY, (batch,), 0, 100)
    return Network(loss, (params, images, labels), _by_hand(loss, *classes))


def _autoencoder(model: Any, batch: int, size: int, *classes: type) -> Network:
    graph, params, rest = split(model)
    loss = lambda params, images: jnp.mean(jnp.square(nnx.merge(graph, params, rest)(images) - images))
    return Network(loss, (params, jax.random.normal(_KEY, (batch, size, size, 3))), _by_hand(loss, *classes))


NETWORKS: dict[str, Callable[[pathlib.Path], Network]] = {
    "Bonsai's ViT": vit,
    "Bonsai's ConvNeXt": convnext,
    "Bonsai's DenseNet": densenet,
    "Bonsai's U-Net": unet,
    "Bonsai's VAE": vae,
    "Bonsai's Mamba-2": mamba,
    "Flax's LM1B": language_model,
    "Flax's ResNet": resnet,
    "Flax's GraphNet": graph_net,
    "recurrent PPO": recurrent_ppo,
    "diffrax's ODE": neural_ode,
}
