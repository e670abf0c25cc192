"""What tiles, schedules and groups of heads add to the rounding error of a bfloat16 gradient:

    python -m benchmarks.long_context_precision

Small decoders of four layers with eight heads, on a CPU in half a minute. The error is that of the whole gradient against the
plain recipe in float64, and its ratio is to the error of the plain recipe in bfloat16.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import record
from experiments.models import llama
from experiments.models.recipe import parse

WIDE = llama.LlamaConfig(64, 128, 4, 8, 8, 16, 256, tied=True, dtype="float64")
NARROW = dataclasses.replace(WIDE, dtype="bfloat16")
RECIPES = ("plain", "tiled=16+slots=2", "tiled=16+groups=2+slots=2", "tiled=16+groups=8+slots=2")


def main() -> None:
    rows = []
    for seed in range(3):
        text = jax.random.randint(jax.random.key(seed + 10), (4, 65), 0, WIDE.vocabulary, jnp.int32)
        params = llama.init(NARROW, jax.random.key(seed))
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: a.astype(jnp.float64), params)
            exact = jax.device_get(gradient(WIDE, "plain", wide, text))
        errors = {recipe: error(gradient(NARROW, recipe, params, text), exact) for recipe in RECIPES}
        rows += [
            {"seed": seed, "recipe": recipe, "error": value, "ratio": value / errors["plain"]}
            for recipe, value in errors.items()
        ]
    for row in rows:
        print(row)
    record.save("long_context_precision", rows)


def gradient(config: llama.LlamaConfig, recipe: str, params: Any, text: jax.Array) -> Any:
    loss = functools.partial(llama.loss, config, parse(recipe))
    return jax.jit(jax.grad(loss))(params, text[:, :-1], text[:, 1:])


def error(gradients: Any, exact: Any) -> float:
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True)
    squares = [(((a.astype(jnp.float32) - b) ** 2).sum(), (b**2).sum()) for a, b in pairs]
    return float(sum(e for e, _ in squares) / sum(s for _, s in squares)) ** 0.5


if __name__ == "__main__":
    main()
