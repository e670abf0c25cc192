"""Networks of the papers whose systems memjax has, at sizes for a CPU."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import memjax
from benchmarks import bptt
from benchmarks.cases.dominated.network import Network, Tool, checkpointed, split, within
from experiments.models.classifiers import MODELS, Residual
from experiments.models.densenet import DenseNet
from experiments.models.transformer import Layer, SwiGLU, Transformer, TransformerConfig

_KEY = jax.random.key(0)


def recurrent(cell: str, length: int, batch: int, hidden: int, slots: tuple[int, ...], nests: Any) -> Network:
    """Backpropagation through time (Gruslys et al. 2016), of the last state alone."""
    keys, gates = jax.random.split(_KEY, 3), bptt.GATES[cell]
    params = {
        "wi": jax.random.normal(keys[0], (hidden, gates * hidden)) * 0.05,
        "wh": jax.random.normal(keys[1], (hidden, gates * hidden)) * 0.05,
        "b": jnp.zeros(gates * hidden),
    }
    by = lambda scan: Tool(functools.partial(bptt.loss_with, scan))
    tools = {f"remat.scan, {count} slots": by(functools.partial(memjax.remat.scan, slots=count)) for count in slots}
    for sizes in nests:
        tools["nest of " + " x ".join(map(str, sizes))] = by(bptt.segments(*sizes))
    xs = jax.random.normal(keys[2], (length, batch, hidden))
    return Network(functools.partial(bptt.loss_with, jax.lax.scan), (params, xs), tools)


def lstm(public: pathlib.Path) -> Network:
    return recurrent("lstm", 1000, 16, 64, (400, 100, 40, 20), ((40,), (10, 10)))


def gru(public: pathlib.Path) -> Network:
    return recurrent("gru", 720, 8, 96, (250, 60, 25, 12), ((24,), (8, 9)))


def densenet(public: pathlib.Path) -> Network:
    """DenseNet-BC (Pleiss et al. 2017), two blocks."""
    make = lambda keep: DenseNet((6, 6), 8, 10, stem="cifar", keep=keep, rngs=nnx.Rngs(0))
    tools = {f'DenseBlock, "{keep}"': keep for keep in ("convolutions", "features")}
    plain, params = _classifier(make("all"))
    by = {name: Tool(_loss_of(*split(make(keep))[::2])) for name, keep in tools.items()}
    return Network(plain, (params, *_images(8, 32, 10)), by)


def _convolutions(name: str, size: int, batch: int, width: float, *blocks: type) -> Network:
    """A classifier of images (Jin et al. 2020)."""
    make = lambda: MODELS[name](16, image_size=size, width=width, rngs=nnx.Rngs(0))
    loss, params = _classifier(make())
    tools = {"compressed": Tool(_loss_of(*split(memjax.compressed(make()))[::2]), rounds=True)}
    if blocks:
        tools["checkpoint of each block"] = Tool(within(functools.partial(checkpointed, *blocks), loss))
    tools["checkpoint, dots"] = Tool(jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable))
    return Network(loss, (params, *_images(batch, size, 16)), tools)


def head(public: pathlib.Path) -> Network:
    """A head over a large vocabulary with its loss (Wijmans et al. 2024)."""
    keys = jax.random.split(_KEY, 3)
    tokens, width, words = 2048, 128, 16000

    def plain(params: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(params["x"] @ params["w"].T, labels).mean()

    def by_hand(params: Any, labels: Any, **options: Any) -> Any:
        return jnp.mean(memjax.linear_cross_entropy(params["x"], params["w"], labels, **options))

    params = {"x": jax.random.normal(keys[0], (tokens, width)), "w": 0.1 * jax.random.normal(keys[1], (words, width))}
    tools = {
        "linear_cross_entropy": Tool(by_hand),
        "linear_cross_entropy, chunks of 128": Tool(functools.partial(by_hand, chunk=128)),
        "linear_cross_entropy of each token": Tool(functools.partial(by_hand, reduction="none")),
    }
    return Network(plain, (params, jax.random.randint(keys[2], (tokens,), 0, words)), tools)


def decoder(public: pathlib.Path) -> Network:
    """A decoder over a long sequence: the layers that METP (Liang et al. 2025) is about, on one device."""
    config = TransformerConfig(vocabulary=8000, dim=128, layers=2, heads=4, kv_heads=2, hidden=512)
    graph, params, rest = split(Transformer(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(_KEY, (1, 1025), 0, config.vocabulary)

    def hidden(params: Any, tokens: Any) -> Any:
        model = nnx.merge(graph, params, rest)
        return model(tokens[:, :-1]), model.head, tokens[:, 1:]

    def plain(params: Any, tokens: Any) -> Any:
        x, w, labels = hidden(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(x @ w.T, labels).mean()

    def no_logits(params: Any, tokens: Any) -> Any:
        return memjax.linear_cross_entropy(*hidden(params, tokens))

    layers, tiles = functools.partial(checkpointed, Layer), functools.partial(_tiled, SwiGLU)
    tools = {
        "linear_cross_entropy": Tool(no_logits),
        "the same, checkpoint of each layer": Tool(within(layers, no_logits)),
        "linear_cross_entropy, remat.tiled": Tool(within(tiles, no_logits)),
        "compressed, linear_cross_entropy": Tool(memjax.compressed(no_logits), rounds=True),
    }
    return Network(plain, (params, tokens), tools)


def _tiled(kind: Any) -> Any:
    call: Any = kind.__call__
    again = lambda self, x: memjax.remat.tiled(call, in_axes=(None, 1), out_axes=1, tile=256)(self, x)
    return mock.patch.object(kind, "__call__", again)


def _loss_of(graph: Any, rest: Any) -> Callable[..., Any]:
    def loss(params: Any, images: Any, labels: Any) -> Any:
        logits = nnx.merge(graph, params, rest, copy=True)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


def _classifier(model: Any) -> tuple[Callable[..., Any], Any]:
    graph, params, rest = split(model)
    return _loss_of(graph, rest), params


def _images(batch: int, size: int, classes: int) -> tuple[Any, Any]:
    images = jax.random.normal(_KEY, (batch, size, size, 3))
    return images, jax.random.randint(_KEY, (batch,), 0, classes)


NETWORKS: dict[str, Callable[[pathlib.Path], Network]] = {
    "LSTM": lstm,
    "GRU": gru,
    "DenseNet": densenet,
    "AlexNet": lambda public: _convolutions("alexnet", 96, 16, 0.25),
    "VGG-16": lambda public: _convolutions("vgg16", 32, 16, 0.25),
    "ResNet-18": lambda public: _convolutions("resnet18", 64, 8, 0.25, Residual),
    "ResNet-50": lambda public: _convolutions("resnet50", 64, 8, 0.125, Residual),
    "head": head,
    "decoder": decoder,
}
