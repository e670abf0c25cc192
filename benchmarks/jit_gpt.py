"""A whole AdamW step of an NNX decoder, 909M parameters, under `nnx.jit` and under `memjax.jit`: `python -m benchmarks.jit_gpt`.

The peer is `nnx.jit` with the largest batch that fits. `memjax.jit(step, budget="device")` runs that batch and larger ones in the
same process. `--small` tries the benchmark on a CPU.
"""

import dataclasses
import gc
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import memjax
from benchmarks import record


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    plain: tuple[int, ...] = (8, 16)
    """Batches under `nnx.jit`."""
    planned: tuple[int, ...] = (16, 32, 64, 128)
    """Batches under `memjax.jit`."""
    steps: int = 5
    """Steps of which the median is taken."""
    budget: str = "device"
    name: str = "jit_gpt"
    """Name of the file of results."""
    small: bool = False
    """A small model, for a CPU."""


@dataclasses.dataclass(frozen=True)
class Size:
    vocabulary: int = 50304
    width: int = 2048
    layers: int = 16
    heads: int = 16
    length: int = 2048


class Block(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        width, kinds = size.width, {"rngs": rngs, "dtype": jnp.bfloat16, "param_dtype": jnp.float32}
        self.heads = size.heads
        self.norm1, self.norm2 = nnx.LayerNorm(width, **kinds), nnx.LayerNorm(width, **kinds)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, **kinds)
        self.out = nnx.Linear(width, width, use_bias=False, **kinds)
        self.up, self.down = nnx.Linear(width, 4 * width, **kinds), nnx.Linear(4 * width, width, **kinds)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        of_heads = self.qkv(self.norm1(x)).reshape(*x.shape[:2], self.heads, -1)
        kernel: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"
        query, key, value = jnp.split(of_heads, 3, -1)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kernel)
        x = x + self.dropout(self.out(attended.reshape(x.shape)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Decoder(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(size.vocabulary, size.width, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x))


def train_step(model, optimizer, tokens):
    def loss(model):
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def timed(step: Any, state: tuple[Any, Any], batch: int, size: Size, steps: int) -> dict[str, Any]:
    """Seconds of the first step, and of the median of further ones."""
    tokens = jax.random.randint(jax.random.key(1), (batch, size.length + 1), 0, size.vocabulary)
    seconds = []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        value = float(step(*state, tokens))
        seconds.append(time.perf_counter() - begun)
    median = statistics.median(seconds[1:])
    rate = round(batch * size.length / median)
    return {"first_s": round(seconds[0], 2), "step_s": round(median, 4), "tokens_per_s": rate, "loss": round(value, 3)}


def main(config: Config) -> None:
    size = Size(512, 64, 4, 4, 128) if config.small else Size()
    model = nnx.jit(lambda: Decoder(size, nnx.Rngs(0)))()
    state = model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
    rows = []
    cases = [("nnx.jit", batch) for batch in config.plain] + [("memjax.jit", batch) for batch in config.planned]
    for case, batch in cases:
        row: dict[str, Any] = {"case": case, "batch": batch}
        step: Any
        if case == "nnx.jit":
            step = nnx.jit(train_step, donate_argnums=(0, 1))
        else:
            step = memjax.jit(train_step, budget=config.budget, donate_argnums=(0, 1))
        try:
            row |= timed(step, state, batch, size, config.steps)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            row["error"] = str(error)[:1000]
        else:
            if case == "memjax.jit":
                tokens = jax.ShapeDtypeStruct((batch, size.length + 1), jnp.int32)
                plan = step.plan(*state, tokens)
                row |= {"budget": plan.budget, "nbytes": plan.nbytes, "plain_nbytes": plan.plain_nbytes}
                row["predicted_time"] = round(plan.seconds / plan.plain_seconds, 4) if any(plan.passes) else 1.0
                row["microbatches"] = plan.microbatches
                row["compiled"] = [
                    {"predicted": one.predicted, "compiled": one.compiled}
                    for part in plan.passes
                    if part
                    for one in part.tries
                ]
        rows.append(row)
        print(json.dumps(row), flush=True)
        del step
        gc.collect()
        if not config.small:
            record.save(config.name, rows)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
