"""Models that others published, each with data and an optimiser, for `benchmarks.public_models`.

Their files are imported unchanged from a folder that has Flax's `examples` and Bonsai's `bonsai`. A file is imported without the
package around it, whose requirements need not be installed.
"""

import hashlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Wrap = Callable[[Any], Any]
# (parameters, other variables, batch, key) -> (loss, other variables)
Loss = Callable[..., tuple[jax.Array, Any]]

CROP = 64  # pixels
_IMAGES = 1536
_CLASSES = 16
_TEXT_BYTES = 2**22


class Case(NamedTuple):
    """A model, its data and its optimiser.

    Attributes:
      files: the model's files, below the folder of public files.
      data: arrays with a leading axis of examples.
      batch: examples per step.
      init: a seed -> parameters and other variables.
      loss: a function `wrap`, which is applied to the model -> the function to differentiate.
      optimizer: the number of steps -> the optimiser.
    """

    files: tuple[str, ...]
    data: dict[str, np.ndarray]
    batch: int
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss: Callable[[Wrap], Loss]
    optimizer: Callable[[int], optax.GradientTransformation]


def make_data() -> dict[str, np.ndarray]:
    """Crops of photographs, which photograph each is from, and text.

    Needs what the experiments need: scikit-image's and scikit-learn's photographs, and the source of Python's library.

    Returns:
      images (N, 64, 64, 3) uint8, labels (N,) int32, text (N,) uint8.
    """
    from experiments.data.photographs import photographs
    from experiments.data.text import standard_library

    photos, rng = photographs(CROP), np.random.default_rng(0)
    items = [photos.train[i] for i in rng.permutation(_IMAGES) % len(photos.train)]
    examples: list[Any] = [photos.train_example(item, rng) for item in items]
    images, labels = (np.stack([example[key] for example in examples]) for key in ("image", "label"))
    return {"images": images, "labels": labels, "text": standard_library().train[:_TEXT_BYTES]}


def imagenet_resnet(public: pathlib.Path, data: Mapping[str, np.ndarray], smoke: bool) -> Case:
    """Flax's ResNet of its ImageNet example: ResNet-50 in bfloat16, or a ResNet of two blocks in float32."""
    file = "examples/imagenet/models.py"
    models = public_module(public, file)
    small = {"stage_sizes": [1, 1], "block_cls": models.ResNetBlock, "num_filters": 16, "dtype": jnp.float32}
    sizes = small if smoke else models.ResNet50.keywords | {"dtype": jnp.bfloat16}
    model = models.ResNet(num_classes=_CLASSES, **sizes)

    def init(seed):
        variables = model.init(jax.random.key(seed), jnp.zeros((1, CROP, CROP, 3)), train=False)
        return variables["params"], variables["batch_stats"]

    def loss(wrap):
        network = wrap(model)

        def run(params, variables, batch, key):
            def on_a_device(images):
                return network.apply({"params": params, "batch_stats": variables}, images, mutable=["batch_stats"])

            # Its batch norms average over the axis "batch": devices in Flax's training, of which there is one here.
            logits, updates = jax.vmap(on_a_device, axis_name="batch")(_normalised(batch["images"])[None])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[0].astype(jnp.float32), batch["labels"])
            return jnp.mean(losses), jax.tree.map(lambda x: x[0], updates["batch_stats"])

        return run

    def optimizer(steps):
        return optax.sgd(optax.cosine_decay_schedule(0.05, steps), momentum=0.9, nesterov=True)

    images = {key: data[key] for key in ("images", "labels")}
    return Case((file,), images, 16 if smoke else 128, init, loss, optimizer)


def lm1b_transformer(public: pathlib.Path, data: Mapping[str, np.ndarray], smoke: bool) -> Case:
    """Flax's Transformer of its language model example, with its dropout, on bytes."""
    file = "examples/lm1b/models.py"
    models = public_module(public, file)
    small: dict[str, Any] = {"emb_dim": 64, "num_heads": 4, "num_layers": 2, "qkv_dim": 64, "mlp_dim": 256}
    length = 128 if smoke else 256
    sizes = small if smoke else {"dtype": jnp.bfloat16}
    config = models.TransformerConfig(vocab_size=256, output_vocab_size=256, max_len=length, **sizes)

    def init(seed):
        key, tokens = jax.random.key(seed), jnp.ones((1, length), jnp.int32)
        variables = models.TransformerLM(config.replace(deterministic=True)).init(key, tokens)
        return nn.meta.unbox(variables["params"]), {}

    def loss(wrap):
        network = wrap(models.TransformerLM(config))

        def run(params, variables, batch, key):
            tokens = batch["text"].astype(jnp.int32)
            logits = network.apply({"params": params}, tokens, rngs={"dropout": key}).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
            weights = (tokens > 0).astype(jnp.float32)  # as in Flax's training: zeros are padding
            return jnp.sum(losses * weights) / jnp.sum(weights), variables

        return run

    windows = data["text"][: len(data["text"]) // length * length].reshape(-1, length)
    return Case((file,), {"text": windows}, 8 if smoke else 32, init, loss, _adam)


def bonsai_unet(public: pathlib.Path, data: Mapping[str, np.ndarray], smoke: bool) -> Case:
    """Bonsai's U-Net, which removes noise from photographs."""
    file = "bonsai/models/unet/modeling.py"
    models = public_module(public, file)
    config = models.ModelConfig(3, 3, (4, 8, 16, 32, 64) if smoke else (32, 64, 128, 256, 512))
    noisy = lambda images, key: images + jax.random.normal(key, images.shape)
    return _denoising(file, lambda rngs: models.UNet(config, rngs=rngs), data, 8 if smoke else 64, noisy)


def bonsai_vae(public: pathlib.Path, data: Mapping[str, np.ndarray], smoke: bool) -> Case:
    """Bonsai's autoencoder of Stable Diffusion, which repeats photographs."""
    file = "bonsai/models/vae/modeling.py"
    models = public_module(public, file)
    config = models.ModelConfig((8,), 4, 4) if smoke else models.ModelConfig((64, 128, 256), 4, 32)
    small = {"images": data["images"][:, :32, :32]}
    make = lambda rngs: models.VAE(config, rngs=rngs)
    return _denoising(file, make, small if smoke else data, 4 if smoke else 32, lambda x, key: x)


CASES: dict[str, Callable[[pathlib.Path, Mapping[str, np.ndarray], bool], Case]] = {
    "imagenet_resnet": imagenet_resnet,
    "lm1b_transformer": lm1b_transformer,
    "bonsai_unet": bonsai_unet,
    "bonsai_vae": bonsai_vae,
}


def digest(public: pathlib.Path, files: tuple[str, ...]) -> dict[str, str]:
    """The first digits of each file's SHA-256: which version was measured."""
    return {file: hashlib.sha256((public / file).read_bytes()).hexdigest()[:16] for file in files}


def _denoising(
    file: str,
    make: Callable[[nnx.Rngs], nnx.Module],
    data: Mapping[str, np.ndarray],
    batch_size: int,
    noisy: Callable[[jax.Array, jax.Array], jax.Array],
) -> Case:
    """An NNX model that gets `noisy(images, key)` and is to return the images."""

    def init(seed):
        parts: Any = nnx.split(make(nnx.Rngs(jax.random.key(seed))), nnx.Param, ...)
        return parts[1:]

    def loss(wrap):
        parts: Any = nnx.split(nnx.eval_shape(lambda: wrap(make(nnx.Rngs(0)))), nnx.Param, ...)

        def run(params, variables, batch, key):
            images = _normalised(batch["images"])
            network = nnx.merge(parts[0], params, variables)
            return jnp.mean(jnp.square(network(noisy(images, key)) - images)), variables

        return run

    return Case((file,), {"images": data["images"]}, batch_size, init, loss, _adam)


def _adam(steps: int) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-4, max(1, steps // 10), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def _normalised(images: jax.Array) -> jax.Array:
    """Bytes -> about -2 to 2."""
    return (images.astype(jnp.float32) - 127.5) / 64


def public_module(public: pathlib.Path, file: str) -> ModuleType:
    path = public / file
    if not path.is_file():
        raise SystemExit(
            f"--models-path {public} has no file {file}: copy Flax's folder examples and Bonsai's folder bonsai into it."
        )
    name = "public_" + "_".join(path.relative_to(public).with_suffix("").parts)
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module
