"""What a gradient of a decoder takes by a recipe: bytes as compiled, seconds of real steps, the longest sequence, errors."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from experiments.harness.reports import memory
from experiments.models import llama
from experiments.models.llama import LlamaConfig
from experiments.models.recipe import Recipe
from experiments.models.stack import codec


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What a compiled gradient takes. Parameters and their gradients count once each, whatever the recipe."""

    temp: int
    total: int


class Gradient:
    """Loss and gradient of a decoder by a recipe, compiled for one sequence of `length` tokens.

    Args:
      quick: compile quickly, for the bytes alone.
      mesh: a ring of devices, its axis named "ring", each of which holds a part of the sequence and of the parameters; None: one.
    """

    def __init__(
        self, config: LlamaConfig, recipe: Recipe, length: int, *, quick: bool = False, mesh: Mesh | None = None
    ):
        params = jax.eval_shape(functools.partial(llama.init, config), jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        options = memory.options_for_memory() if quick else memjax.remat_compiler_options()
        gradient = jax.value_and_grad(
            functools.partial(llama.loss, config, recipe, axis_name=None if mesh is None else "ring")
        )
        self._tokens_at = None
        if mesh is not None:
            specs = llama.shards(params, "ring"), P(None, "ring"), P(None, "ring")
            gradient = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=(P(), specs[0]))
            self._tokens_at = NamedSharding(mesh, specs[1])
            params = memory.placed(params, params_at(config, mesh))
            tokens = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=self._tokens_at)
        self.length = length
        self._step = jax.jit(gradient, compiler_options=options).lower(params, tokens, tokens).compile()

    @property
    def bytes(self) -> Bytes:
        found: Any = self._step.memory_analysis()
        temp = found.temp_size_in_bytes
        return Bytes(temp, temp + found.argument_size_in_bytes + found.output_size_in_bytes)

    def seconds(self, params: Any, text: np.ndarray, steps: int = 2) -> list[float]:
        """How long each of some steps takes, on the beginning of `text`, which is repeated if it is too short."""
        return [self.step(params, text)[0] for _ in range(steps)]

    def step(self, params: Any, text: np.ndarray) -> tuple[float, float, float]:
        """Seconds of one such step, its loss, and the norm of its gradient."""
        window = np.resize(text, self.length + 1)[None].astype(np.int32)
        tokens, labels = map(self._put, (window[:, :-1], window[:, 1:]))
        begin = time.perf_counter()
        value, gradients = self._step(params, tokens, labels)
        jax.block_until_ready((value, gradients))
        seconds = time.perf_counter() - begin
        loss, norm = float(value), float(_norm(gradients))
        if not math.isfinite(loss + norm):
            raise FloatingPointError(f"the loss of {self.length} tokens is {loss}, the norm of its gradient {norm}")
        return seconds, loss, norm

    def _put(self, tokens: np.ndarray) -> jax.Array:
        """On a ring in zigzag order, in which devices have equally much to attend to."""
        if self._tokens_at is None:
            return jnp.asarray(tokens)
        ordered = memjax.shard.zigzag(jnp.asarray(tokens), self._tokens_at.mesh.size)
        return jax.device_put(ordered, self._tokens_at)


def params_at(config: LlamaConfig, mesh: Mesh) -> Any:
    """How a `Gradient` over a ring wants the parameters."""
    params = jax.eval_shape(functools.partial(llama.init, config), jax.random.key(0))
    return jax.tree.map(functools.partial(NamedSharding, mesh), llama.shards(params, "ring"))


@jax.jit
def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))


@jax.jit
def _relative_error(exact: Any, found: Any) -> jax.Array:
    difference = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), exact, found)
    return _norm(difference) / _norm(exact)


def longest(bytes_of: Callable[[int], int], limit: int, *, fixed: int, unit: int, first: int, last: int) -> int:
    """The longest length, a multiple of `unit` up to `last`, within `limit` bytes, to a sixteenth; 0 if `first` does not fit.

    Args:
      bytes_of: of a length, growing with it.
      fixed: bytes that do not depend on the length. The rest is nearly proportional to it, so the next length to try is where
        a straight line reaches the limit, not the middle between what fits and what does not.
    """
    low, of_low = first, bytes_of(first)
    if of_low > limit:
        return 0
    high = of_high = 0
    while low < last and not (high and high - low <= max(unit, low // 16)):
        if high:
            share = (limit - of_low) / (of_high - of_low)
            middle = low + (high - low) * min(max(share, 1 / 16), 15 / 16)
        else:
            middle = min(1.02 * low * (limit - fixed) / max(of_low - fixed, 1), last)
        length = max(int(middle) // unit * unit, low + unit)
        found = bytes_of(length)
        if found <= limit:
            low, of_low = length, found
        else:
            high, of_high = length, found
    return low


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def gradient_error(
    config: LlamaConfig, recipe: Recipe, params: Any, text: np.ndarray, length: int
) -> dict[str, float | None]:
    """By how much compressed inputs of layers change the gradient, relative to it: as measured, and the most that is expected.

    Rounding at random to levels d apart has a variance of d^2 / 6 on average. The gradient of a layer, and of all below, sees
    the rounding of its input once, and those of layers and positions are independent. So if what positions contribute to the
    gradient is independent as well, the error is as large relative to the gradient as that of an input is to the input, and
    squares add up over layers. Where contributions agree, as on real text, the gradient is larger and the error is not.

    With slots there is no expectation (None): layers that are recomputed from one slot share its rounding.
    """
    exact = dataclasses.replace(recipe, kept="checkpoint", bits=None)
    window = jnp.asarray(np.resize(text, length + 1)[None], jnp.int32)
    gradients = [
        jax.jit(jax.grad(functools.partial(llama.loss, config, r)))(params, window[:, :-1], window[:, 1:])
        for r in (exact, recipe)
    ]

    def step(x, p):
        code: Any = codec(recipe, config.dim).encode(x)
        variance = jnp.mean(jnp.square(code.ranges[1])) / 6  # of the distance of levels
        return llama.layer(config, exact, p, x), variance / jnp.mean(jnp.square(x.astype(jnp.float32)))

    measured = float(_relative_error(*gradients))
    if recipe.kept == "slots":
        return {"at_most": None, "measured": measured}
    x = params["embed"][window[:, :-1]]
    squares = jax.jit(lambda x, p: jax.lax.scan(step, x, p)[1])(x, params["layers"])
    return {"at_most": float(jnp.sqrt(jnp.sum(squares))), "measured": measured}
