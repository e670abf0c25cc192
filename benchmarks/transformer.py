"""One gradient of a stack of Llama layers with checkpoints, schedules and codecs: `python -m benchmarks.transformer`.

8 layers of Llama 3.2 1B's shape, embedding and `linear_cross_entropy` included, 4 sequences of 4,096 tokens, bfloat16: one GPU
of 80 GB or more, about six minutes, most of which compile. Writes `results/transformer.json`, a row for each way to run the
layers. On a CPU:

    python -m benchmarks.transformer --layers 2 --dim 64 --hidden 128 --heads 4 --kv-heads 2 --vocabulary 512 \
        --sequences 2 --tokens 128 --rounds 1 --budgets 1MiB --name scratch

Errors are distances from the gradient of the plain layers. How far that is from a gradient in float32 is the row "rounding",
which has no time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.ad_checkpoint import checkpoint_name
from rich.console import Console

import memjax
from benchmarks import record
from benchmarks.gradients import compare, relative_distance
from memjax import compress, remat
from memjax.remat import policies

Layer = Callable[[Any, jax.Array], jax.Array]
Stack = Callable[[list[Any], jax.Array], jax.Array]

_ATTENTION = ("attention_output",)
_PROJECTIONS = ("query", "key", "value")
_STREAM = ("after_attention",)
_MLP = ("gate", "up")


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 8
    dim: int = 2048
    hidden: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    sequences: int = 4
    tokens: int = 4096
    """Tokens of a sequence."""
    budgets: tuple[str, ...] = ("2GiB", "6GiB")
    """Budgets of `remat.chain`."""
    rounds: int = 7
    cases: tuple[str, ...] = ()
    """Parts of the names of the cases to run beside the plain layers; none runs all."""
    name: str = "transformer"


def main(config: Config) -> None:
    rows = measure(config)
    for row in rows:
        Console(width=150).print(row)
    sizes = {key: value for key, value in dataclasses.asdict(config).items() if key not in ("cases", "name")}
    record.save(config.name, [row | sizes for row in rows])


def measure(config: Config) -> list[dict[str, Any]]:
    params = jax.jit(functools.partial(init, config))(jax.random.key(0))
    shape = (config.sequences, config.tokens)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocabulary)
    layer = functools.partial(llama_layer, config)
    ways = {
        name: jax.grad(functools.partial(loss, stack))
        for name, stack in stacks(layer, config.budgets).items()
        if name == "plain" or not config.cases or any(part in name for part in config.cases)
    }
    rows = compare(ways, (params, tokens), rounds=config.rounds)
    return [*rows, {"case": "rounding", "gradient_error": rounding(layer, params, tokens)}]


def stacks(layer: Layer, budgets: tuple[str, ...]) -> dict[str, Stack]:
    """Ways to run the layers one after the other, by what is around each layer; the plain layers come first."""
    checkpoint = lambda *names: each(remat.checkpoint(layer, policy=policies.save(*names)))
    compressed = lambda *codec: each(memjax.compressed(layer, *codec, inputs=1))
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return {
        "plain": each(layer),
        "checkpoint": each(jax.checkpoint(layer)),
        "checkpoint, products kept": each(jax.checkpoint(layer, policy=dots)),
        "compressed": compressed(),
        "compressed, ChannelQuantized(8)": compressed(compress.ChannelQuantized(8)),
        "compressed, GroupQuantized(8)": compressed(compress.GroupQuantized(8)),
        "compressed, ErrorBounded(2**-7)": compressed(compress.ErrorBounded(2**-7, bits_per_value=14)),
        "compressed, ChannelQuantized(4)": compressed(compress.ChannelQuantized(4)),
        "checkpoint, attention kept": checkpoint(*_ATTENTION),
        "checkpoint, attention, projections kept": checkpoint(*_ATTENTION, *_PROJECTIONS),
        "checkpoint, attention, mlp kept": checkpoint(*_ATTENTION, *_MLP),
        "checkpoint, all names kept": checkpoint(*_ATTENTION, *_PROJECTIONS, *_STREAM, *_MLP),
        **{f"chain, {budget}": _chain(layer, budget) for budget in budgets},
    }


def each(layer: Layer) -> Stack:
    def stack(params: list[Any], x: jax.Array) -> jax.Array:
        for p in params:
            x = layer(p, x)
        return x

    return stack


def _chain(layer: Layer, budget: str) -> Stack:
    return lambda params, x: remat.chain([layer] * len(params), params, x, budget=budget)


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Parameters in bfloat16, with standard deviations of 1 / sqrt(inputs)."""

    def matrix(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
        return (jax.random.normal(key, (inputs, outputs)) * inputs**-0.5).astype(jnp.bfloat16)

    dim, hidden, kv_dim = config.dim, config.hidden, config.dim // config.heads * config.kv_heads
    shapes = {"query": (dim, dim), "key": (dim, kv_dim), "value": (dim, kv_dim), "out": (dim, dim)}
    shapes |= {"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}
    norms = {name: jnp.ones(dim, jnp.bfloat16) for name in ("attention_norm", "mlp_norm")}
    *layer_keys, embedding_key = jax.random.split(key, config.layers + 1)
    layers = []
    for layer_key in layer_keys:
        keys = jax.random.split(layer_key, len(shapes))
        layers.append(norms | {name: matrix(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)})
    embedding = matrix(embedding_key, config.vocabulary, dim) * jnp.bfloat16((config.vocabulary / dim) ** 0.5)
    return {"embedding": embedding, "layers": layers, "norm": jnp.ones(dim, jnp.bfloat16)}


def loss(stack: Stack, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next tokens; the head is the embedding."""
    x = stack(params["layers"], params["embedding"][tokens])
    return memjax.linear_cross_entropy(rms_norm(x, params["norm"]), params["embedding"], jnp.roll(tokens, -1, 1))


def llama_layer(config: Config, params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Grouped-query attention with rotary positions, and SwiGLU, each after an RMS norm."""
    heads = lambda name, y: checkpoint_name(
        (y @ params[name]).reshape(*x.shape[:2], -1, config.dim // config.heads), name
    )
    normalised = rms_norm(x, params["attention_norm"])
    query, key, value = (heads(name, normalised) for name in _PROJECTIONS)
    # cuDNN's kernels take 16-bit floats alone.
    cudnn = jax.default_backend() == "gpu" and x.dtype.itemsize == 2
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn" if cudnn else None, is_causal=True)
    attention = checkpoint_name(attend(rotate(query), rotate(key), value).reshape(x.shape), *_ATTENTION)
    x = checkpoint_name(x + attention @ params["out"], *_STREAM)
    normalised = rms_norm(x, params["mlp_norm"])
    gate, up = (checkpoint_name(normalised @ params[name], name) for name in _MLP)
    return x + (jax.nn.silu(gate) * up) @ params["down"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions: the two halves of (sequences, tokens, heads, features) as pairs, turned by the position."""
    half = x.shape[-1] // 2
    position, pair = (jnp.arange(count, dtype=jnp.float32) for count in (x.shape[1], half))
    angles = position[:, None] * 500_000.0 ** (-pair / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rounding(layer: Layer, params: dict[str, Any], tokens: jax.Array) -> float:
    """The distance of the plain layers' gradient from that of the same parameters in float32."""
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(jax.grad(functools.partial(loss, each(jax.checkpoint(layer)))))(wide, tokens)
    return float(relative_distance(jax.jit(jax.grad(functools.partial(loss, each(layer))))(params, tokens), exact))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
