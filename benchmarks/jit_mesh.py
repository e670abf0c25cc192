"""AdamW steps of Llama layers, fully sharded over all GPUs: policies by hand, and `memjax.jit` within the bytes of each:
`python -m benchmarks.jit_mesh`.

Layers are unrolled, or a scan over stacked parameters. State is donated. `--small` tries the benchmark on simulated CPU devices.

With `--vocabulary` it is a whole decoder, of which this is the shape of Llama 3 8B, with 8,192 tokens on each device:

    python -m benchmarks.jit_mesh --layers 32 --width 4096 --hidden 14336 --vocabulary 128256 --length 8192 --examples 1

With `--ahead 4xH200` steps are planned for GPUs that need not be there, within `--budgets`, and their times are predicted.
"""

import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")  # of a GPU's memory; by itself JAX takes three quarters

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from benchmarks import record
from experiments.models.llama import rotated
from memjax._commands.devices import described

Policy = Literal["nothing", "attention", "attention and hidden", "products", "plain"]


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
    vocabulary: int = 0
    """How many entries an embedding and a head have; the loss is `memjax.linear_cross_entropy` then, and layers have rotary
    positions. 0: the layers alone."""
    policies: tuple[Policy, ...] = ("nothing", "attention", "attention and hidden")
    """What is kept by hand; "plain" is the step without `jax.checkpoint`, with which `memjax.jit` would be the same."""
    budgets: tuple[str, ...] = ()
    """Budgets of `memjax.jit` alone, after these."""
    steps: int = 8
    """Steps of which the median is taken."""
    warm: int = 1
    """Steps before these."""
    name: str = "jit_mesh"
    """Name of the file of results."""
    small: bool = False
    """A small model, for CPUs."""
    ahead: str = ""
    """GPUs for which steps are planned and not run."""


OPTIMIZER = optax.adamw(1e-4)
POLICIES: dict[Policy, tuple[str, ...] | None] = {
    "nothing": (),
    "attention": ("x",),
    "attention and hidden": ("x", "hidden"),
    "products": ("x", "hidden", "heads"),
    "plain": None,
}
"""By-hand policies: the names that are kept beside attention's results; "nothing" keeps the inputs of layers alone, "products"
all that matrix products give."""
_MOST = 0.98  # of a device's memory: a step that holds more is not run


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
    split = lambda a, heads: checkpoint_name(a.reshape(*x.shape[:2], heads, -1), "heads")
    query = split(h @ p["query"], config.heads)
    key, value = (split(h @ p[name], config.key_heads) for name in ("key", "value"))
    if config.vocabulary:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)
        query, key = (rotated(a, positions, 500_000.0) for a in (query, key))
    kernel: Any = "cudnn" if config.ahead or jax.default_backend() == "gpu" else "xla"
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kernel)
    x = checkpoint_name(x + attended.reshape(x.shape) @ p["out"], "x")
    h = norm(x, p["norm2"])
    gate, up = (checkpoint_name(h @ p[name], "hidden") for name in ("gate", "up"))
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def checkpointed(f: Callable[..., Any], names: tuple[str, ...] | None) -> Callable[..., Any]:
    if names is None:
        return f
    if not names:
        return jax.checkpoint(f)
    is_attention = lambda primitive, *_, **__: "dot_product_attention" in primitive.name
    policies = jax.checkpoint_policies
    policy = policies.save_from_both_policies(is_attention, policies.save_only_these_names(*names))
    return jax.checkpoint(f, policy=policy)


def step_of(config: Config, mode: str, mesh: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    def stack(params: Any, x: jax.Array) -> jax.Array:
        if mode == "scan":
            return jax.lax.scan(lambda x, p: (f(p, x), None), x, params)[0]
        for p in params:
            x = f(p, x)
        return x

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if not config.vocabulary:
            return jnp.mean(stack(params, x).astype(jnp.float32) ** 2)
        placed = lambda a, spec: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))
        embedded = placed(placed(params["embedding"], P())[x], P("data"))
        last = norm(stack(params["layers"], embedded), params["norm"])
        return memjax.linear_cross_entropy(last, params["head"], jnp.roll(x, -1, 1))

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
    params: Any
    if mode == "scan":
        params = jax.jit(jax.vmap(make), out_shardings=split(P(None, "data")))(keys)
    else:
        params = [jax.jit(make, out_shardings=split(P("data")))(key) for key in keys]
    shape, key = (config.examples * mesh.size, config.length), jax.random.key(1)
    normal = lambda *shape: jax.random.normal(key, shape, jnp.bfloat16)
    draw = lambda: normal(*shape, config.width)
    if config.vocabulary:
        table = lambda: normal(config.vocabulary, config.width) * jnp.bfloat16(config.width**-0.5)
        tables = lambda: {"embedding": table(), "head": table(), "norm": jnp.ones(config.width, jnp.bfloat16)}
        params = {"layers": params, **jax.jit(tables, out_shardings=split(P("data")))()}
        draw = lambda: jax.random.randint(key, shape, 0, config.vocabulary)
    x = jax.jit(draw, out_shardings=split(P("data")))()
    everywhere = lambda a: a if a.ndim else jax.device_put(a, split(P()))
    return params, jax.tree.map(everywhere, OPTIMIZER.init(params)), x


def types_of_arguments(config: Config, mode: str, mesh: Any) -> Any:
    """Their types, split likewise, for devices that need not be there."""

    def placed(path: Any, a: Any) -> jax.ShapeDtypeStruct:
        stacked = mode == "scan" and any(getattr(key, "key", "") == "layers" for key in path)
        spec = (P(None, "data") if stacked else P("data")) if a.ndim else P()
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(placed, jax.eval_shape(functools.partial(arguments, config, mode, mesh)))


def held(compiled: Any) -> int:
    found = compiled.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes + found.generated_code_size_in_bytes


def room() -> float:
    """Bytes of a device that a step may hold."""
    return _MOST * (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))


def timed(step: Any, start: Callable[[], Any], config: Config) -> dict[str, Any]:
    """Milliseconds of the median step, the loss after all, and the most bytes that each device has held until now."""
    params, state, x = start()
    seconds = []
    for _ in range(config.warm + config.steps):
        begun = time.perf_counter()
        params, state, value = step(params, state, x)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - begun)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    ms = round(1e3 * statistics.median(seconds[config.warm :]), 2)
    return {"ms": ms, "loss": float(value), "peaks": [one.get("peak_bytes_in_use") for one in stats]}


def planned(step: Any, structs: Any, start: Callable[[], Any], config: Config) -> dict[str, Any]:
    """The step under `memjax.jit`, or why not."""
    begun = time.perf_counter()
    try:
        plan = step.plan(*structs)
        tries = sum(len(part.tries) for part in plan.passes if part)
        row = {"planned_held": plan.nbytes, "tries": tries, "plan_s": round(time.perf_counter() - begun, 1)}
        if plan.plain_seconds:
            row["predicted_time"] = round(plan.seconds / plan.plain_seconds, 4)
        if config.ahead:
            return row
        print(json.dumps(row), flush=True)
        return row | {f"planned_{name}": value for name, value in timed(step, start, config).items()}
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return {"plan_s": round(time.perf_counter() - begun, 1), "error": str(error)[:500]}


def rows_of(config: Config, mode: str, mesh: Any) -> Iterator[dict[str, Any]]:
    start = functools.partial(arguments, config, mode, mesh)
    if config.ahead:
        structs = types_of_arguments(config, mode, mesh)
    else:  # Nothing but a step is on the devices while it is compiled or run.
        structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), start())
    shardings = jax.tree.map(lambda a: a.sharding, structs)
    options: dict[str, Any] = {"donate_argnums": (0, 1), "out_shardings": (*shardings[:2], None)}
    plain = functools.partial(layer, config)
    step = step_of(config, mode, mesh, plain)
    same: dict[str, Any] = {"mode": mode, "devices": mesh.size, "tokens": config.examples * config.length}
    for name in () if config.ahead else config.policies:
        f = checkpointed(plain, POLICIES[name])
        begun = time.perf_counter()
        by_hand = jax.jit(step_of(config, mode, mesh, f), **options).lower(*structs).compile()
        budget = held(by_hand)
        row = same | {"policy": name, "held": budget, "compile_s": round(time.perf_counter() - begun, 1)}
        if budget > room():
            yield row | {"error": "more than a device has"}
            continue
        if name != "plain":  # first, so that the most bytes held are its own if they were more than before
            row |= planned(memjax.jit(step, budget=budget, **options), structs, start, config)
        try:
            row |= timed(by_hand, start, config)
        except jax.errors.JaxRuntimeError as error:
            row["by_hand_error"] = str(error)[:500]
        if "planned_ms" in row and "ms" in row:
            row |= {"time": round(row["planned_ms"] / row["ms"], 4), "losses": [row["loss"], row["planned_loss"]]}
        yield row
    for words in config.budgets:
        row = same | {"budget": words}
        yield row | planned(memjax.jit(step, budget=words, **options), structs, start, config)


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
            "vocabulary": min(config.vocabulary, 512),
        }
        config = dataclasses.replace(config, **small, steps=2)
    devices = described(config.ahead).devices if config.ahead else jax.devices()
    mesh = Mesh(np.asarray(devices), ("data",), axis_types=(AxisType.Auto,))
    rows: list[dict[str, Any]] = []
    for mode in config.modes:
        for row in rows_of(config, mode, mesh):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if not config.small:
                record.save(config.name, rows)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
