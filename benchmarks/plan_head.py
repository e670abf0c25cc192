"""Logits of a large vocabulary: the plain loss, without logits by hand, and planned with tiles: `python -m benchmarks.plan_head`.

"head" is the product with the vocabulary's matrix and optax's loss. "model" is a Flax language model as one writes it, with the
same loss; by hand its head is taken out, and hidden states go to `memjax.linear_cross_entropy`. The plan is made of the plain
loss, for 1.2 times the temporary bytes of what was done by hand, or of the least memory if that is more. Value and gradient are
compiled and timed, by turns; two minutes on an H200. On a CPU: `--tiny`, half a minute, saves nothing.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import linen as nn

import memjax
from benchmarks import record
from benchmarks.plan import by_turns, compiled

BUDGET = 1.2


@dataclasses.dataclass(frozen=True)
class Shape:
    """A language model, and its input."""

    vocabulary: int = 128256
    width: int = 2048
    hidden: int = 8192
    heads: int = 16
    layers: int = 4
    batch: int = 4
    length: int = 4096
    runs: int = 10


TINY = Shape(vocabulary=4096, width=64, hidden=128, heads=2, layers=1, batch=2, length=256, runs=2)


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    parts: tuple[str, ...] = ("head", "model")
    tiny: bool = False
    """Small shapes, on a CPU."""


class Decoder(nn.Module):
    """Pre-norm Transformer layers with a tied head."""

    shape: Shape

    def setup(self) -> None:
        shape = self.shape
        self.embed = nn.Embed(shape.vocabulary, shape.width, dtype=jnp.bfloat16)
        self.layers = [Layer(shape) for _ in range(shape.layers)]
        self.norm = nn.RMSNorm(dtype=jnp.bfloat16)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.hidden(tokens)).astype(jnp.float32)


class Layer(nn.Module):
    """Causal attention, and a feed-forward layer."""

    shape: Shape

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = self.shape
        size = shape.width // shape.heads
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        q, k, v = (nn.DenseGeneral((shape.heads, size), use_bias=False, dtype=jnp.bfloat16)(h) for _ in range(3))
        attend: Any = jax.nn.dot_product_attention
        o = attend(q, k, v, is_causal=True, implementation="cudnn" if jax.default_backend() == "gpu" else "xla")
        x += nn.DenseGeneral(shape.width, axis=(-2, -1), use_bias=False, dtype=jnp.bfloat16)(o)
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        h = nn.gelu(nn.Dense(shape.hidden, use_bias=False, dtype=jnp.bfloat16)(h))
        return x + nn.Dense(shape.width, use_bias=False, dtype=jnp.bfloat16)(h)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def head(shape: Shape) -> tuple[Callable[..., Any], Callable[..., Any], tuple]:
    """The loss with logits, that without, and arguments."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = (jax.random.normal(keys[0], (shape.vocabulary, shape.width)) * shape.width**-0.5).astype(jnp.bfloat16)
    x = jax.random.normal(keys[1], (shape.batch, shape.length, shape.width), jnp.bfloat16)
    labels = jax.random.randint(keys[2], (shape.batch, shape.length), 0, shape.vocabulary)
    return (
        lambda w, x, labels: cross_entropy((x @ w.T).astype(jnp.float32), labels),
        lambda w, x, labels: memjax.linear_cross_entropy(x, w, labels),
        (w, x, labels),
    )


def model(shape: Shape) -> tuple[Callable[..., Any], Callable[..., Any], tuple]:
    """The same of a language model."""
    decoder = Decoder(shape)
    tokens = jax.random.randint(jax.random.key(0), (shape.batch, shape.length + 1), 0, shape.vocabulary)
    variables = jax.jit(decoder.init)(jax.random.key(1), tokens[:, :8])

    def plain(variables: Any, scale: jax.Array, tokens: jax.Array) -> jax.Array:
        logits: Any = decoder.apply(variables, tokens[:, :-1])
        return scale * cross_entropy(logits, tokens[:, 1:])

    def by_hand(variables: Any, scale: jax.Array, tokens: jax.Array) -> jax.Array:
        hidden: Any = decoder.apply(variables, tokens[:, :-1], method="hidden")
        w = variables["params"]["embed"]["embedding"].astype(jnp.bfloat16)
        return scale * memjax.linear_cross_entropy(hidden, w, tokens[:, 1:])

    return plain, by_hand, (variables, jnp.ones(()), tokens)


def measured(part: str, shape: Shape) -> list[dict[str, Any]]:
    plain, by_hand, args = {"head": head, "model": model}[part](shape)
    programs = {"plain": compiled(plain, args), "by hand": compiled(by_hand, args)}
    budget = int(BUDGET * programs["by hand"][1])
    least = memjax.plan(plain, *args, budget="min", allow=("recompute", "tile"), argnums=(0, 1)).nbytes
    plan = memjax.plan(plain, *args, budget=max(budget, least), allow=("recompute", "tile"), argnums=(0, 1))
    programs["planned"] = compiled(memjax.planned(plain, plan=plan), args)
    print(plan, flush=True)
    edited = memjax.plan(by_hand, *args, budget=budget, argnums=(0, 1))
    programs["by hand, planned"] = compiled(memjax.planned(by_hand, plan=edited), args)
    times = by_turns([program for program, _ in programs.values()], args, shape.runs)
    rows = []
    for (name, (program, nbytes)), ms in zip(programs.items(), times, strict=True):
        value, gradients = program(*args) if ms is not None else (None, ())
        norm = (
            None
            if gradients is None
            else sum(float(jnp.sum(leaf.astype(jnp.float32) ** 2)) for leaf in jax.tree.leaves(gradients))
        )
        row = {"part": part, "loss": name, "bytes": nbytes, "ms": ms, "value": None if value is None else float(value)}
        rows.append(
            row | {"squares_of_gradients": norm, "tokens": shape.batch * shape.length, "vocabulary": shape.vocabulary}
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(config: Config) -> None:
    rows = []
    for part in config.parts:
        rows += measured(part, TINY if config.tiny else Shape())
        if not config.tiny:
            record.save("plan_head", rows)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
