"""All weights of a Llama of 8B parameters trained on one GPU, whole AdamW steps, with nothing on the host:

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m benchmarks.finetune_large

Weights are bfloat16, rounded at random or with split masters; AdamW's moments are in codes. Layers are stacked and scanned over.
Attention is cuDNN's flash attention, the loss `memjax.linear_cross_entropy`. `--forward-backward` runs the same without update,
`--policy checkpoint` under `jax.jit` with `jax.checkpoint` round each layer. A step of 131,072 tokens takes about 3e16 FLOP, more
than a minute on an H100; planning it takes a few.

    python -m benchmarks.finetune_large --ahead h100.txtpb

compiles for a GPU that is not there, described in a file as `--xla_gpu_target_config_filename` takes it, and prints bytes. It
takes JAX's CUDA plugin. Without a GPU XLA gives cuDNN no workspace, so that the budget is less by that. `--small` tries either
on a CPU.
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
from jax.sharding import SingleDeviceSharding

import memjax
from benchmarks import record
from benchmarks.jit_ahead import feed_forward, rotary
from benchmarks.jit_mesh import norm
from memjax import compress


@dataclasses.dataclass(frozen=True)
class Config:
    """What to train."""

    layers: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    key_heads: int = 8
    head: int = 128
    """Width of a head."""
    vocabulary: int = 128256
    tokens: int = 131072
    """Length of the sequence. A step has one."""
    tile: int = 8192
    """Tokens of a feed-forward layer at once, by `memjax.remat.tiled`; 0: all."""
    bits: int = 8
    """Bits of each value of AdamW's moments: 8 or 4 in codes, 32 for float32."""
    master: Literal["rounded", "split"] = "rounded"
    """bfloat16 weights alone, rounded at random, or float32 masters whose upper halves they are."""
    state: Literal["device", "host"] = "device"
    """Where the step has AdamW's moments by itself. From the host it moves those of one layer at a time, and back."""
    policy: Literal["plan", "checkpoint"] = "plan"
    """`memjax.jit`, or `jax.jit` with `jax.checkpoint` round each layer."""
    budget: str = "75GiB"
    """Memory that the step may hold, as for `memjax.jit`."""
    allow: tuple[str, ...] = ("recompute", "tile")
    """What plans may do; "offload": have the moments on the host."""
    steps: int = 3
    """The first is timed by itself. 0: plan and compile."""
    forward_backward: bool = False
    """Leave the update out: gradients are results."""
    cache_dir: pathlib.Path | None = None
    """Where plans and compiled steps are kept for the next run."""
    ahead: pathlib.Path | None = None
    """A file that describes a GPU to compile for; nothing runs."""
    peak: float = 989e12
    """FLOP/s of the device by its data sheet: an H100's."""
    small: bool = False
    """A small model, for a CPU."""
    name: str = "finetune_large"
    """Name of the file of results."""


def as_small(config: Config) -> Config:
    sizes: dict[str, Any] = {"layers": 4, "width": 128, "hidden": 256, "heads": 4, "key_heads": 2, "head": 32}
    return dataclasses.replace(config, small=True, **sizes, vocabulary=512, tokens=256, tile=min(config.tile, 128))


def shapes(config: Config) -> dict[str, Any]:
    """Shapes of the weights. Those of layers are stacked."""
    width, queries, keys = config.width, config.heads * config.head, config.key_heads * config.head
    layer = {
        "query": (width, queries),
        "key": (width, keys),
        "value": (width, keys),
        "out": (queries, width),
        "gate": (width, config.hidden),
        "up": (width, config.hidden),
        "down": (config.hidden, width),
        "norm1": (width,),
        "norm2": (width,),
    }
    stacked = {name: (config.layers, *shape) for name, shape in layer.items()}
    return {
        "embedding": (config.vocabulary, width),
        "layers": stacked,
        "norm": (width,),
        "head": (config.vocabulary, width),
    }


def parameters(config: Config) -> Any:
    """Types of the weights."""
    is_shape = lambda one: isinstance(one, tuple)
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16), shapes(config), is_leaf=is_shape)


def optimizer(config: Config) -> optax.GradientTransformation:
    tx: Any = optax.adamw(1e-4)
    if config.bits < 32:
        tx = memjax.compressed(tx, bits=config.bits)
    return compress.split_master(tx) if config.master == "split" else compress.stochastic_round(tx)


def weights(config: Config) -> Any:
    """Made on the device one after another, those of layers one layer at a time."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
        *layers, rows, columns = shape
        one = lambda key: scale * jax.random.normal(key, (rows, columns), jnp.bfloat16)
        return jax.lax.map(one, jax.random.split(key, layers[0])) if layers else one(key)

    def weight(path: Any, struct: Any) -> jax.Array:
        name = path[-1].key
        if name.startswith("norm"):
            return jnp.ones(struct.shape, struct.dtype)
        key = jax.random.fold_in(jax.random.key(0), sum(map(ord, name)))
        scale = 0.02 / math.sqrt(2 * config.layers) if name in ("out", "down") else 0.02
        return normal(key, struct.shape, scale)

    return jax.tree_util.tree_map_with_path(weight, parameters(config))


def begin(config: Config) -> tuple[Any, Any]:
    """Weights and the optimizer's state."""
    params = weights(config)
    state = jax.jit(optimizer(config).init)(params)
    if config.state == "host":
        state = jax.device_put(state, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    return params, state


def attention(config: Config, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    kernel: Any = "xla" if config.small else "cudnn"
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kernel)


def layer(config: Config, p: dict[str, jax.Array], x: jax.Array, attend: Callable[..., Any] = attention) -> jax.Array:
    h = norm(x, p["norm1"])
    split = lambda a, heads: a.reshape(*x.shape[:2], heads, -1)
    query = rotary(split(h @ p["query"], config.heads))
    key, value = (split(h @ p[name], config.key_heads) for name in ("key", "value"))
    attended = attend(config, query, rotary(key), value)
    x = x + attended.reshape(*x.shape[:2], -1) @ p["out"]
    forward = feed_forward
    if config.tile:
        forward = memjax.remat.tiled(feed_forward, in_axes=(None, 1), out_axes=1, tile=config.tile)
    return x + forward({name: p[name] for name in ("norm2", "gate", "up", "down")}, x)


def step_of(config: Config) -> Callable[..., Any]:
    """A step: from weights, state and tokens to new ones and the loss; or to the loss and gradients."""
    f: Callable[..., Any] = functools.partial(layer, config)
    tx = optimizer(config)
    if config.policy == "checkpoint":
        f = jax.checkpoint(f)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens]
        x = jax.lax.scan(lambda x, p: (f(p, x), None), x, params["layers"])[0]
        return memjax.linear_cross_entropy(norm(x, params["norm"]), params["head"], jnp.roll(tokens, -1, 1))

    def forward_backward(params: Any, tokens: jax.Array) -> Any:
        return jax.value_and_grad(loss)(params, tokens)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        if config.state == "host":
            state = jax.device_put(state, jax.memory.Space.Device)
        updates, state = tx.update(gradients, state, params)
        if config.state == "host":
            state = jax.device_put(state, jax.memory.Space.Host)
        return optax.apply_updates(params, updates), state, value

    return forward_backward if config.forward_backward else step


def jitted(config: Config, budget: int | str) -> Any:
    options: dict[str, Any] = {} if config.forward_backward else {"donate_argnums": (0, 1)}
    if config.policy == "checkpoint" and config.ahead is None:
        return jax.jit(step_of(config), **options)
    if config.policy == "checkpoint":
        budget = 2**60  # the program of `jax.jit`, traced for the GPU that is not there
    return memjax.jit(step_of(config), budget=budget, allow=config.allow, cache_dir=config.cache_dir, **options)


def flops(config: Config) -> float:
    """FLOPs of a step that recomputes nothing: 6 for each token and each weight of a matrix, and those of causal attention."""
    tree = shapes(config)
    products = math.prod(tree["head"]) + sum(math.prod(s) for s in tree["layers"].values() if len(s) == 3)
    attention = 6 * config.layers * config.tokens**2 * config.heads * config.head
    return 6.0 * products * config.tokens + attention


def workspace(config: Config) -> int:
    """Bytes that cuDNN's backward pass works with: see `benchmarks.jit_ahead.workspace`."""
    return config.tokens * config.heads * (8 * config.head + 4) + 256


def kinds(memory: Any, count: int) -> dict[str, Any]:
    """Bytes of a compiled step by kind."""
    found = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "host": memory.host_argument_size_in_bytes,
    }
    held = found["arguments"] + found["results"]
    return found | {"arguments_and_results_a_parameter": round(held / count, 4)}


def compile_ahead(config: Config, count: int) -> dict[str, Any]:
    assert config.ahead is not None
    if config.state == "host":
        raise SystemExit("--state host needs the GPU; for one that is not there, pass --allow recompute tile offload")
    jax.devices()  # the backend of this machine has to exist first
    text = config.ahead.read_text()
    topology: Any = topologies.get_topology_desc(
        platform="cuda", topology_name="described", topology="1x1x1", target_config=text
    )
    on = SingleDeviceSharding(topology.devices[0])
    params = parameters(config)
    args: tuple[Any, ...] = (params, jax.ShapeDtypeStruct((1, config.tokens), jnp.int32))
    if not config.forward_backward:
        args = (params, jax.eval_shape(optimizer(config).init, params), args[1])
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on), args)
    beside = workspace(config)
    step = jitted(config, bytes_of(config.budget) - beside)
    return {"device": topology.devices[0].device_kind, "workspace": beside} | compiled(config, step, args, count)


def compiled(config: Config, step: Any, args: tuple[Any, ...], count: int) -> dict[str, Any]:
    """What is known of a step before it runs."""
    begun = time.perf_counter()
    found: dict[str, Any] = {}
    if config.policy == "plan":
        plan = step.plan(*args)
        print(plan, flush=True)
        found = {"held": plan.nbytes, "plain": plan.plain_nbytes, "as_written": plan.as_written, "plan": str(plan)}
        if plan.plain_seconds:
            found["predicted_time"] = round(plan.seconds / plan.plain_seconds, 4)
    if config.policy == "checkpoint" or config.ahead is not None:
        found |= kinds(step.lower(*args).compile().memory_analysis(), count)
    return found | {"compile_s": round(time.perf_counter() - begun, 1)}


def run(config: Config, count: int) -> dict[str, Any]:
    params, state = begin(config)
    tokens = jax.random.randint(jax.random.key(1), (1, config.tokens), 0, config.vocabulary)
    if config.forward_backward:
        state = None
    budget = config.budget if config.budget in ("device", "min") else bytes_of(config.budget)
    step = jitted(config, budget)
    found = compiled(config, step, (params, tokens) if state is None else (params, state, tokens), count)
    if not config.steps:
        return found
    losses, seconds = [], []
    for _ in range(config.steps):
        begun = time.perf_counter()
        if state is None:
            value = step(params, tokens)[0]
        else:
            params, state, value = step(params, state, tokens)
        losses.append(round(float(value), 4))
        seconds.append(time.perf_counter() - begun)
        print(f"loss {losses[-1]}, {seconds[-1]:.2f} s", flush=True)
    best = float(np.median(seconds[1:] or seconds))
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "device": jax.devices()[0].device_kind,
        "step_s": round(best, 3),
        "tokens_per_s": round(config.tokens / best),
        "utilisation": round(flops(config) / best / config.peak, 4),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "losses": losses,
        "first_s": round(seconds[0], 2),
    } | found


def bytes_of(text: str) -> int:
    number = text.removesuffix("GiB")
    return int(float(number) * 2**30) if number != text else int(text)


def main(config: Config) -> None:
    if config.small:
        config = as_small(config)
    count = sum(math.prod(struct.shape) for struct in jax.tree.leaves(parameters(config)))
    case = dataclasses.asdict(config) | {"ahead": config.ahead and config.ahead.name, "parameters": count}
    del case["cache_dir"]
    row = case | (run(config, count) if config.ahead is None else compile_ahead(config, count))
    print(json.dumps(row), flush=True)
    if not config.small:
        record.save(config.name, [row])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
