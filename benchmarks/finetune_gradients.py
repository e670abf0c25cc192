"""How far gradients in bfloat16 are from those in float32, in the model of `benchmarks.finetune_large` before its first step:

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m benchmarks.finetune_gradients --layers 40 --width 5120 --hidden 17408 \\
        --heads 40 --vocabulary 151936 --tokens 16384 --budget 75GiB

AdamW's first step has the signs of the gradients. Each row is one way to compute them, all in one process: layer by layer in
plain JAX, a compiled function for each, without loops, checkpoints or memjax; `jax.jit` with `jax.checkpoint` round each layer of
a scan; `memjax.jit` in the budget. It has the share of signs that differ from those in float32, by layer, and from those of
bfloat16 layer by layer. Of the gradients by layer that enter a layer from above it has the norm, and the cosine with those in
float32, of the first 64 tokens and of the next 64. `--small` tries it on a CPU.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import memjax
from benchmarks import finetune_large, record
from benchmarks.finetune_large import Config
from benchmarks.jit_mesh import norm

EARLY = 64  # tokens at the beginning, which all others see
KERNELS = ("query", "key", "value", "out", "gate", "up", "down")


def attention_by_heads(config: Config, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of one head after another, so that float32 fits."""
    mask = jnp.tril(jnp.ones((query.shape[1], query.shape[1]), bool))

    @jax.checkpoint
    def head(arrays: tuple[jax.Array, ...]) -> jax.Array:
        query, key, value = arrays  # (T, D)
        scores = jnp.where(mask, query @ key.T / math.sqrt(config.head), -jnp.inf)
        return jax.nn.softmax(scores, -1) @ value

    key, value = (jnp.repeat(a[0], config.heads // config.key_heads, 1) for a in (key, value))
    by_head = tuple(a.swapaxes(0, 1) for a in (query[0], key, value))
    return jax.lax.map(head, by_head).swapaxes(0, 1)[None]


def layer_of(config: Config, wide: bool) -> Callable[..., jax.Array]:
    if not wide:
        return functools.partial(finetune_large.layer, config)
    config = dataclasses.replace(config, tile=0)
    upcast = lambda p: jax.tree.map(lambda a: a.astype(jnp.float32), p)
    return lambda p, x: finetune_large.layer(config, upcast(p), x, attention_by_heads)


def signs(a: jax.Array) -> jax.Array:
    """Signs of every eighth row."""
    return jnp.sign(a[::8]).astype(jnp.int8)


def by_layers(
    config: Config, params: Any, tokens: jax.Array, wide: bool
) -> tuple[float, dict[str, np.ndarray], list[np.ndarray]]:
    """The loss, signs of the gradients of layers' kernels, and gradients of what enters layers, of the first tokens."""
    f = layer_of(config, wide)
    dtype = jnp.float32 if wide else jnp.bfloat16
    take = jax.jit(lambda layers, i: jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, False), layers))

    def loss(x: jax.Array, scale: jax.Array, head: jax.Array) -> jax.Array:
        return memjax.linear_cross_entropy(norm(x, scale), head, jnp.roll(tokens, -1, 1))

    @jax.jit
    def backward(p: Any, x: jax.Array, g: jax.Array) -> Any:
        dp, dx = jax.vjp(f, p, x)[1](g)
        return {name: signs(dp[name]) for name in KERNELS}, dx

    forward = jax.jit(f)
    xs = [params["embedding"][tokens].astype(dtype)]
    for i in range(config.layers):
        xs.append(forward(take(params["layers"], i), xs[-1]))
    last, head = (params[name].astype(dtype) for name in ("norm", "head"))
    value, g = jax.jit(jax.value_and_grad(loss))(xs.pop(), last, head)
    del head
    found: dict[str, list[Any]] = {name: [] for name in KERNELS}
    entering = []
    for i in reversed(range(config.layers)):
        dp, g = backward(take(params["layers"], i), xs.pop(), g)
        for name in KERNELS:
            found[name].append(np.asarray(dp[name]))
        entering.append(np.asarray(g[0, : 2 * EARLY], np.float32))
    return float(value), {name: np.stack(a[::-1]) for name, a in found.items()}, entering[::-1]


def by_gradients(config: Config, params: Any, tokens: jax.Array) -> tuple[float, dict[str, np.ndarray], str]:
    """The loss, signs of gradients, and the plan, of one compiled function."""
    f = finetune_large.jitted(config, finetune_large.bytes_of(config.budget))
    value, gradients = f(params, tokens)
    plan = str(f.plan(params, tokens)) if config.policy == "plan" else ""
    one = jax.jit(signs)
    layers = {name: np.stack([np.asarray(one(a)) for a in gradients["layers"][name]]) for name in KERNELS}
    return float(value), layers, plan


def differ(found: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Shares of signs that differ, by layer."""
    return {
        name: [round(float(np.mean(a != b)), 4) for a, b in zip(found[name], other[name], strict=True)]
        for name in KERNELS
    }


def cosines(found: list[np.ndarray], other: list[np.ndarray], rows: slice) -> list[float]:
    pairs = [(a[rows].ravel(), b[rows].ravel()) for a, b in zip(found, other, strict=True)]
    return [round(float(a @ b / np.sqrt((a @ a) * (b @ b))), 4) for a, b in pairs]


def main(config: Config) -> None:
    if config.small:
        config = finetune_large.as_small(config)
    config = dataclasses.replace(config, forward_backward=True)
    params = finetune_large.weights(config)
    tokens = jax.random.randint(jax.random.key(1), (1, config.tokens), 0, config.vocabulary)
    rows: list[dict[str, Any]] = []

    def add(way: str, value: float, begun: float, **more: Any) -> None:
        rows.append({"way": way, "loss": value, **more, "seconds": round(time.perf_counter() - begun, 1)})
        means = {name: float(f"{np.mean(shares):.2g}") for name, shares in more.get("from_float32", {}).items()}
        print(json.dumps({"way": way, "loss": value, "signs that differ from float32": means}), flush=True)

    begun = time.perf_counter()
    with jax.default_matmul_precision("highest"):
        value, exact, entering = by_layers(config, params, tokens, wide=True)
    norms = [float(f"{np.linalg.norm(g[:EARLY]):.4g}") for g in entering]
    add("float32, layer by layer", value, begun, first_norms=norms)

    begun = time.perf_counter()
    value, layers, narrow = by_layers(config, params, tokens, wide=False)
    first, others = (cosines(narrow, entering, rows) for rows in (slice(EARLY), slice(EARLY, None)))
    add(
        "bfloat16, layer by layer",
        value,
        begun,
        from_float32=differ(layers, exact),
        first_cosines=first,
        next_cosines=others,
    )

    for policy in ("checkpoint", "plan"):
        begun = time.perf_counter()
        one = dataclasses.replace(config, policy=policy)
        value, found, plan = by_gradients(one, params, tokens)
        shares = {"from_float32": differ(found, exact), "from_layers": differ(found, layers)}
        add({"checkpoint": "jax.checkpoint", "plan": "memjax.jit"}[policy], value, begun, **shares, plan=plan)
    case = {
        name: getattr(config, name) for name in ("layers", "width", "hidden", "heads", "vocabulary", "tokens", "budget")
    }
    if not config.small:
        record.save("finetune_gradients", [case | row for row in rows])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
