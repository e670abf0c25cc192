"""AdamW steps of Llama layers, fully sharded over all GPUs: policies by hand, and `memjax.jit` within the bytes of each:
`python -m benchmarks.jit_mesh`.

Layers are unrolled, or a scan over stacked parameters. State is donated. `--small` tries the benchmark on simulated CPU devices.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from benchmarks import record


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    modes: tuple[Literal["unrolled", "scan"], ...] = ("scan", "unrolled")
    layers: int = 6
    width: int = 2048
    hidden: int = 8192
    heads: int = 32
    key_heads: int = 8
    length: int = 4096
    examples: int = 4
    """Sequences on each device."""
    steps: int = 8
    """Steps of which the median is taken."""
    name: str = "jit_mesh"
    """Name of the file of results."""
    small: bool = False
    """A small model, for CPUs."""


OPTIMIZER = optax.adamw(1e-4)
POLICIES = {"nothing": (), "attention": ("x",), "attention and hidden": ("x", "hidden")}
"""By-hand policies: the names that are kept beside attention's results; "nothing" keeps the inputs of layers alone."""


def init(config: Config, key: jax.Array) -> dict[str, jax.Array]:
    width, head = config.width, config.width // config.heads
    sizes = {
        "query": (width, config.heads * head),
        "key": (width, config.key_heads * head),
        "value": (width, config.key_heads * head),
        "out": (config.heads * head, width),
        "gate": (width, config.hidden),
        "up": (width, config.hidden),
        "down": (config.hidden, width),
    }
    keys = jax.random.split(key, len(sizes))
    draw = lambda key, size: (jax.random.normal(key, size) / size[0] ** 0.5).astype(jnp.bfloat16)
    kernels = {name: draw(key, size) for key, (name, size) in zip(keys, sizes.items(), strict=True)}
    return kernels | {name: jnp.ones(width, jnp.bfloat16) for name in ("norm1", "norm2")}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def layer(config: Config, p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    h = norm(x, p["norm1"])
    split = lambda a, heads: a.reshape(*x.shape[:2], heads, -1)
    query = split(h @ p["query"], config.heads)
    key, value = (split(h @ p[name], config.key_heads) for name in ("key", "value"))
    kernel: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kernel)
    x = checkpoint_name(x + attended.reshape(x.shape) @ p["out"], "x")
    h = norm(x, p["norm2"])
    gate, up = (checkpoint_name(h @ p[name], "hidden") for name in ("gate", "up"))
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def checkpointed(f: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    if not names:
        return jax.checkpoint(f)
    is_attention = lambda primitive, *_, **__: "dot_product_attention" in primitive.name
    policies = jax.checkpoint_policies
    policy = policies.save_from_both_policies(is_attention, policies.save_only_these_names(*names))
    return jax.checkpoint(f, policy=policy)


def step_of(mode: str, f: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        if mode == "scan":
            x = jax.lax.scan(lambda x, p: (f(p, x), None), x, params)[0]
        else:
            for p in params:
                x = f(p, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def arguments(config: Config, mode: str, mesh: Any) -> tuple[Any, Any, jax.Array]:
    """Parameters, the optimizer's state and examples, each split over the devices."""
    split = lambda spec: NamedSharding(mesh, spec)
    keys = jax.random.split(jax.random.key(0), config.layers)
    make = functools.partial(init, config)
    if mode == "scan":
        params = jax.jit(jax.vmap(make), out_shardings=split(P(None, "data")))(keys)
    else:
        params = [jax.jit(make, out_shardings=split(P("data")))(key) for key in keys]
    shape = (config.examples * mesh.size, config.length, config.width)
    x = jax.device_put(jax.random.normal(jax.random.key(1), shape, jnp.bfloat16), split(P("data")))
    everywhere = lambda a: a if a.ndim else jax.device_put(a, split(P()))
    return params, jax.tree.map(everywhere, OPTIMIZER.init(params)), x


def held(compiled: Any) -> int:
    found = compiled.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes + found.generated_code_size_in_bytes


def timed(step: Any, params: Any, state: Any, x: jax.Array, steps: int) -> tuple[float, float]:
    """Milliseconds of the median step, and the loss after all."""
    params, state = jax.tree.map(jnp.copy, (params, state))
    seconds = []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        params, state, value = step(params, state, x)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - begun)
    return round(1e3 * statistics.median(seconds[1:]), 2), float(value)


def main(config: Config) -> None:
    if config.small:
        small: dict[str, Any] = {
            "layers": 4,
            "width": 64,
            "hidden": 256,
            "heads": 4,
            "key_heads": 2,
            "length": 128,
            "examples": 2,
        }
        config = dataclasses.replace(config, **small, steps=2)
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    rows: list[dict[str, Any]] = []
    for mode in config.modes:
        args = arguments(config, mode, mesh)
        shardings = jax.tree.map(lambda a: a.sharding, args)
        options: dict[str, Any] = {"donate_argnums": (0, 1), "out_shardings": (*shardings[:2], None)}
        plain = functools.partial(layer, config)
        for name, names in POLICIES.items():
            by_hand = jax.jit(step_of(mode, checkpointed(plain, names)), **options).lower(*args).compile()
            budget = held(by_hand)
            ms, value = timed(by_hand, *args, config.steps)
            row: dict[str, Any] = {"mode": mode, "policy": name, "devices": mesh.size, "held": budget, "ms": ms}
            planned = memjax.jit(step_of(mode, plain), budget=budget, **options)
            try:
                plan = planned.plan(*args)
                ms, own = timed(planned, *args, config.steps)
                tries = sum(len(part.tries) for part in plan.passes if part)
                row |= {"planned_held": plan.nbytes, "planned_ms": ms, "tries": tries, "time": round(ms / row["ms"], 4)}
                row["losses"] = [value, own]
            except ValueError as error:
                row["error"] = str(error)[:500]
            rows.append(row)
            print(json.dumps(row), flush=True)
            if not config.small:
                record.save(config.name, rows)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
