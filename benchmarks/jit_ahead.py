"""A plan for eight GPUs that are not there: an AdamW step in the shape of Llama-3-8B, fully sharded, within bytes of a device:

    python -m benchmarks.jit_ahead --target-config h200.txtpb

It takes JAX's CUDA plugin, and a description of the GPU as `--xla_gpu_target_config_filename` takes it. Everything is compiled
for these GPUs and nothing runs. A compilation takes 10 s as a scan over stacked parameters, and a minute unrolled, on two cores;
plans take two to eight. `--layers 2 --batches 8 1024` tries it.

Masters and AdamW's state are float32, layers compute in bfloat16, and attention is cuDNN's flash attention, through
`jax.nn.dot_product_attention`: scores of 131,072 tokens would not fit. `memjax.linear_cross_entropy` is the loss, by jax.numpy
where no GPU traces it. XLA without a GPU gives cuDNN no workspace: budgets are less `workspace`, and it comes on top of bytes.
"""

import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from benchmarks import record
from benchmarks.jit_mesh import norm


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    target_config: pathlib.Path
    """A file that describes the GPU."""
    modes: tuple[Literal["scan", "unrolled"], ...] = ("scan", "unrolled")
    policies: tuple[Literal["plan", "checkpoint", "plain"], ...] = ("checkpoint", "plan")
    """`memjax.jit`, and `jax.jit` with `jax.checkpoint` round each layer, or as it is."""
    budgets: tuple[float, ...] = (80.0, 139.0)
    """GiB of a device, for plans and the workspace of attention."""
    batches: tuple[tuple[int, int], ...] = ((8, 8192), (1, 131072))
    """Sequences on each device, and their tokens."""
    devices: int = 8
    layers: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128256
    tile: int = 0
    """Tokens of a feed-forward layer at once, by `memjax.remat.tiled`; 0: all."""
    allow: tuple[str, ...] = ("recompute", "tile")
    """What plans may do."""
    compiler_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the compiler."""
    name: str = "jit_ahead"
    """Name of the file of results."""


OPTIMIZER = optax.adamw(1e-4)


def mesh_of(config: Config) -> Mesh:
    jax.devices()  # the backend of this machine has to exist first
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="described",
        topology=f"1x1x{config.devices}",
        target_config=config.target_config.read_text(),
    )
    return Mesh(np.array(topology.devices), ("data",), axis_types=(AxisType.Auto,))


def parameters(config: Config, mode: str) -> Any:
    """Shapes of the parameters."""
    width, head = config.width, config.width // config.heads
    sizes = {
        "query": (width, config.heads * head),
        "key": (width, config.key_heads * head),
        "value": (width, config.key_heads * head),
        "out": (config.heads * head, width),
        "gate": (width, config.hidden),
        "up": (width, config.hidden),
        "down": (config.hidden, width),
        "norm1": (width,),
        "norm2": (width,),
    }
    if mode == "scan":
        layers: Any = {name: (config.layers, *size) for name, size in sizes.items()}
    else:
        layers = [sizes] * config.layers
    whole = (config.vocabulary, width)
    return {"embedding": whole, "layers": layers, "norm": (width,), "head": whole}


def arguments(config: Config, mode: str, batch: tuple[int, int], mesh: Mesh) -> tuple[Any, Any, Any, Any]:
    """Types of parameters, the optimizer's state, tokens and labels, each split over the devices."""
    struct = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
    stacked = lambda path: mode == "scan" and path[0].key == "layers"
    of_parameter = lambda path, shape: struct(shape, jnp.float32, *([None] if stacked(path) else []), "data")
    is_shape = lambda one: isinstance(one, tuple)
    params = jax.tree_util.tree_map_with_path(of_parameter, parameters(config, mode), is_leaf=is_shape)
    state = jax.tree.map(lambda a: struct(a.shape, a.dtype), jax.eval_shape(OPTIMIZER.init, params))
    state = optax.tree_utils.tree_map_params(OPTIMIZER, lambda _, parameter: parameter, state, params)
    examples, length = batch
    tokens = struct((examples * mesh.size, length), jnp.int32, "data")
    return params, state, tokens, tokens


def rotary(x: jax.Array) -> jax.Array:
    """Positions for queries or keys, (B, T, H, D)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def layer(config: Config, p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    p = jax.tree.map(lambda a: a.astype(x.dtype), p)
    h = norm(x, p["norm1"])
    split = lambda a, heads: a.reshape(*x.shape[:2], heads, -1)
    query = rotary(split(h @ p["query"], config.heads))
    key, value = (split(h @ p[name], config.key_heads) for name in ("key", "value"))
    attended = jax.nn.dot_product_attention(query, rotary(key), value, is_causal=True, implementation="cudnn")
    x = x + attended.reshape(x.shape) @ p["out"]
    forward = feed_forward
    if config.tile:
        forward = memjax.remat.tiled(feed_forward, in_axes=(None, 1), out_axes=1, tile=config.tile)
    return x + forward({name: p[name] for name in ("norm2", "gate", "up", "down")}, x)


def feed_forward(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    h = norm(x, p["norm2"])
    return (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def step_of(mode: str, f: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embedding"].astype(jnp.bfloat16)[tokens]
        if mode == "scan":
            x = jax.lax.scan(lambda x, p: (f(p, x), None), x, params["layers"])[0]
        else:
            for p in params["layers"]:
                x = f(p, x)
        x = norm(x, params["norm"].astype(x.dtype))
        return memjax.linear_cross_entropy(x, params["head"].astype(x.dtype), labels)

    def step(params: Any, state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens, labels)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def workspace(config: Config, batch: tuple[int, int]) -> int:
    """Bytes that cuDNN's backward pass works with: exact for 16,384, 65,536 and 131,072 tokens on an H100, with JAX 0.11.2."""
    return math.prod(batch) * config.heads * (8 * (config.width // config.heads) + 4) + 256


def held(compiled: Any) -> int:
    found = compiled.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes + found.generated_code_size_in_bytes


def compiled(config: Config, mode: str, policy: str, args: tuple[Any, ...], budget: int | None) -> dict[str, Any]:
    """What the step holds on a device, compiled; `budget` is bytes."""
    f = functools.partial(layer, config)
    shardings = jax.tree.map(lambda a: a.sharding, args)
    options: dict[str, Any] = {
        "donate_argnums": (0, 1),
        "out_shardings": (*shardings[:2], None),
        "compiler_options": config.compiler_options or None,
    }
    begun = time.perf_counter()
    if budget is None:
        step = step_of(mode, jax.checkpoint(f) if policy == "checkpoint" else f)
        found: dict[str, Any] = {"held": held(jax.jit(step, **options).lower(*args).compile())}
    else:
        planned = memjax.jit(step_of(mode, f), budget=budget, allow=config.allow, **options)
        try:
            plan = planned.plan(*args)
            tries = sum(len(part.tries) for part in plan.passes if part)
            found = {"held": plan.nbytes, "plain": plan.plain_nbytes, "as_written": plan.as_written, "tries": tries}
            if plan.plain_seconds:
                found["predicted_time"] = round(plan.seconds / plan.plain_seconds, 4)
        except ValueError as error:
            found = {"error": str(error)[:500]}
    return found | {"seconds": round(time.perf_counter() - begun, 1)}


def main(config: Config) -> None:
    mesh = mesh_of(config)
    machine = f"compiled for {mesh.size} {mesh.devices[0].device_kind}, not run"
    rows: list[dict[str, Any]] = []
    for batch in config.batches:
        for mode in config.modes:
            args = arguments(config, mode, batch, mesh)
            for policy in config.policies:
                for budget in config.budgets if policy == "plan" else (None,):
                    case: dict[str, Any] = {
                        "machine": machine,
                        "batch": batch,
                        "mode": mode,
                        "policy": policy,
                        "budget_gib": budget,
                    }
                    case |= {"tile": config.tile, "compiler_options": config.compiler_options}
                    beside = workspace(config, batch)
                    room = None if budget is None else int(budget * 2**30) - beside
                    rows.append(case | {"workspace": beside} | compiled(config, mode, policy, args, room))
                    print(json.dumps(rows[-1]), flush=True)
                    record.save(config.name, rows)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
