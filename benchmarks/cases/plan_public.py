"""Losses of models that others published, at the size of a GPU, for `benchmarks.plan_public`: only shapes, no data.

Their files are imported unchanged, as in `benchmarks/cases/public_models.py`. Parameters are float32; losses compute in bfloat16.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.cases.public_models import public_module


class Case(NamedTuple):
    """A loss and the types of its arguments, of which the first is differentiated."""

    loss: Callable[..., jax.Array]
    types: tuple[Any, ...]


def vit(public: pathlib.Path, small: bool) -> Case:
    """Bonsai's ViT, as ViT-L/16 on 224 x 224."""
    models = public_module(public, "bonsai/models/vit/modeling.py")
    width, layers, side, batch = (64, 2, 64, 4) if small else (1024, 24, 224, 128)
    sizes = {"hidden_dim": width, "mlp_dim": 4 * width, "num_heads": width // 64 or 1, "num_layers": layers}
    fixed = {"num_channels": 3, "attn_dropout_prob": 0.0, "dropout_prob": 0.0, "eps": 1e-12, "num_labels": 1000}
    config = models.ModelConfig(image_size=(side, side), patch_size=(16, 16), **sizes, **fixed)
    make = lambda: models.ViTClassificationModel(config, rngs=nnx.Rngs(0))
    return _classifier(make, lambda model, x: model(x, rngs=nnx.Rngs(1)), batch, side)


def convnext(public: pathlib.Path, small: bool) -> Case:
    """Bonsai's ConvNeXt, large, on 224 x 224."""
    models = public_module(public, "bonsai/models/convnext/modeling.py")
    config = models.ModelConfig.convnext_tiny_224() if small else models.ModelConfig.convnext_large_224()
    make = lambda: models.ConvNeXt(config, rngs=nnx.Rngs(0))
    return _classifier(make, lambda model, x: model(x, rngs=None, train=True), 2 if small else 64, 64 if small else 224)


def unet(public: pathlib.Path, small: bool) -> Case:
    """Bonsai's U-Net with the channels of the paper, on 256 x 256."""
    models = public_module(public, "bonsai/models/unet/modeling.py")
    features, side, batch = ((8, 16, 32, 64, 128), 32, 2) if small else ((64, 128, 256, 512, 1024), 256, 16)
    config = models.ModelConfig(3, 3, features)
    graph, state = _abstract(lambda: models.UNet(config, rngs=nnx.Rngs(0)))

    def loss(params: Any, images: jax.Array) -> jax.Array:
        model = nnx.merge(graph, _bfloat16(params))
        return jnp.mean(jnp.square(model(images).astype(jnp.float32) - images.astype(jnp.float32)))

    return Case(loss, (state, jax.ShapeDtypeStruct((batch, side, side, 3), jnp.bfloat16)))


def resnet(public: pathlib.Path, small: bool) -> Case:
    """Flax's ResNet-50 of its ImageNet example, on 224 x 224."""
    models = public_module(public, "examples/imagenet/models.py")
    side, batch = (64, 4) if small else (224, 256)
    sizes = {"stage_sizes": [1, 1], "block_cls": models.ResNetBlock, "num_filters": 16}
    model = models.ResNet(num_classes=1000, dtype=jnp.bfloat16, **(sizes if small else models.ResNet50.keywords))
    images = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.bfloat16)
    variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), images)

    def loss(params: Any, stats: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        # Its batch norms average over the axis "batch": devices in Flax's training, of which there is one here.
        apply = lambda x: model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])[0]
        logits = jax.vmap(apply, axis_name="batch")(images[None])[0]
        return _cross_entropy(logits, labels)

    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return Case(loss, (variables["params"], variables["batch_stats"], images, labels))


def language_model(public: pathlib.Path, small: bool) -> Case:
    """Flax's language model of its LM1B example, in the shape of GPT-2 medium, with dropout."""
    models = public_module(public, "examples/lm1b/models.py")
    width, layers, length, batch, words = (64, 2, 64, 2, 512) if small else (1024, 24, 1024, 8, 50257)
    sizes = {"emb_dim": width, "num_heads": max(1, width // 64), "num_layers": layers, "qkv_dim": width}
    sizes |= {"mlp_dim": 4 * width, "max_len": length, "vocab_size": words, "output_vocab_size": words}
    config = models.TransformerConfig(dtype=jnp.bfloat16, **sizes)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    still = models.TransformerLM(config.replace(deterministic=True))
    params = nn.meta.unbox(jax.eval_shape(lambda x: still.init(jax.random.key(0), x), tokens)["params"])

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        logits = models.TransformerLM(config).apply({"params": params}, tokens, rngs={"dropout": key})
        return _cross_entropy(logits, tokens)

    return Case(loss, (params, tokens, jax.eval_shape(lambda: jax.random.key(0))))


def translation(public: pathlib.Path, small: bool) -> Case:
    """Flax's encoder and decoder of its WMT example, as large as "Transformer big", with dropout."""
    models = public_module(public, "examples/wmt/models.py")
    width, layers, length, batch, words = (64, 1, 32, 2, 512) if small else (1024, 6, 512, 32, 32000)
    sizes = {"emb_dim": width, "num_heads": max(1, width // 64), "num_layers": layers, "qkv_dim": width}
    sizes |= {"mlp_dim": 4 * width, "max_len": length, "vocab_size": words, "output_vocab_size": words}
    config = models.TransformerConfig(dtype=jnp.bfloat16, **sizes)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    still = models.Transformer(config.replace(deterministic=True))
    params = nn.meta.unbox(jax.eval_shape(lambda x: still.init(jax.random.key(0), x, x), tokens)["params"])

    def loss(params: Any, inputs: jax.Array, targets: jax.Array, key: jax.Array) -> jax.Array:
        logits = models.Transformer(config).apply({"params": params}, inputs, targets, rngs={"dropout": key})
        return _cross_entropy(logits, targets)

    return Case(loss, (params, tokens, tokens, jax.eval_shape(lambda: jax.random.key(0))))


CASES: dict[str, Callable[[pathlib.Path, bool], Case]] = {
    "vit": vit,
    "language_model": language_model,
    "resnet": resnet,
    "unet": unet,
    "translation": translation,
    "convnext": convnext,
}


def _classifier(
    make: Callable[[], nnx.Module], call: Callable[[Any, jax.Array], jax.Array], batch: int, side: int
) -> Case:
    graph, state = _abstract(make)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return _cross_entropy(call(nnx.merge(graph, _bfloat16(params)), images), labels)

    images = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.bfloat16)
    return Case(loss, (state, images, jax.ShapeDtypeStruct((batch,), jnp.int32)))


def _abstract(make: Callable[[], nnx.Module]) -> tuple[Any, Any]:
    """Structure and plain tree of types of a module's variables."""
    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.to_pure_dict(state))


def _bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return jnp.mean(losses)
