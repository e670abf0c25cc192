"""Policies of `jax.checkpoint` by hand against `memjax.planned` at the same bytes: `python -m benchmarks.plan`.

A Llama stack of the shape of the 1B model, 8 layers with 4 x 4,096 tokens or 6 with 131,072, unrolled or in `jax.lax.scan`.
For each policy the step is compiled and timed, then planned for exactly the temporary bytes that the policy takes, compiled
and timed, the two by turns. `--kinds chain` gives the layers to `memjax.remat.chain` in place of `planned`. With `--between`
plans are also made for the middle of each two policies that follow one another. About eight minutes for each table on an H200:
`--kinds unrolled --tokens 16384` runs one. On a CPU: `--tiny`, a minute, saves nothing.
"""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.ad_checkpoint import checkpoint_name

import memjax
from benchmarks import record


@dataclasses.dataclass(frozen=True)
class Shape:
    """A stack of layers, and its input."""

    layers: int
    batch: int
    length: int
    width: int = 2048
    hidden: int = 8192
    heads: int = 32
    kv_heads: int = 8
    runs: int = 10

    @property
    def tokens(self) -> int:
        return self.batch * self.length


SHAPES = (Shape(8, 4, 4096), Shape(6, 1, 131072, runs=3))
TINY = (Shape(2, 2, 128, width=64, hidden=256, heads=4, kv_heads=2, runs=2),)
HEAD = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    kinds: tuple[str, ...] = ("unrolled", "scanned")
    """Layers in Python's loop, or in that of JAX; "chain": in Python's loop, and as the blocks of a chain."""
    tokens: tuple[int, ...] = (16384, 131072)
    between: bool = False
    """Plan for budgets between those of the policies, too."""
    policies: tuple[str, ...] = ()
    """Some of the policies by name; all where none is named."""
    workers: int = 1
    """Policies that are planned and compiled at a time. With more than one, planning is not timed."""
    runs: int | None = None
    """Timed runs of each step; ten of the short ones and three of the long ones where this is not said."""
    tiny: bool = False
    """A small stack and two policies, on a CPU."""


def parameters(shape: Shape, key: jax.Array) -> dict[str, jax.Array]:
    q, kv = shape.heads * HEAD, shape.kv_heads * HEAD
    shapes = {"q": (shape.width, q), "k": (shape.width, kv), "v": (shape.width, kv), "o": (q, shape.width)}
    shapes |= dict.fromkeys(("gate", "up"), (shape.width, shape.hidden)) | {"down": (shape.hidden, shape.width)}
    keys = jax.random.split(key, len(shapes))
    draw = lambda key, shape: (jax.random.normal(key, shape) * shape[0] ** -0.5).astype(jnp.bfloat16)
    weights = {name: draw(key, size) for key, (name, size) in zip(keys, shapes.items(), strict=True)}
    return weights | {name: jnp.ones(shape.width, jnp.bfloat16) for name in ("norm1", "norm2")}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    frequency = 500000.0 ** (-jnp.arange(0, HEAD, 2, dtype=jnp.float32) / HEAD)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def layer(p: dict[str, jax.Array], x: jax.Array, *, implementation: Any) -> jax.Array:
    h: jax.Array = norm(x, p["norm1"])
    heads = lambda w: (h @ w).reshape(*x.shape[:2], -1, HEAD)
    q, k, v = (checkpoint_name(y, "qkv") for y in (rotated(heads(p["q"])), rotated(heads(p["k"])), heads(p["v"])))
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    x = checkpoint_name(x + o.reshape(*x.shape[:2], -1) @ p["o"], "x2")
    h = norm(x, p["norm2"])
    gate, up = (checkpoint_name(h @ p[name], "gate_up") for name in ("gate", "up"))
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def loss(stack: Any, x: jax.Array, *, kind: str, layer: Callable[..., jax.Array]) -> jax.Array:
    if kind == "scanned":
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, stack)
    else:
        for p in stack:
            x = layer(p, x)
    return squares(x)


def squares(x: jax.Array) -> jax.Array:
    return jnp.sum(x.astype(jnp.float32) ** 2)


def is_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    return "dot_product_attention" in primitive.name


def policies(long: bool, tiny: bool) -> dict[str, Any]:
    """Policies for `jax.checkpoint` by name; None: no checkpoint. Long sequences leave no memory for some."""
    built_in = jax.checkpoint_policies
    both = built_in.save_from_both_policies
    named = lambda *names: both(is_attention, built_in.save_only_these_names(*names))
    found = {
        "nothing": built_in.nothing_saveable,
        "attention": is_attention,
        "attention, x2": named("x2"),
        "attention, qkv": named("qkv"),
        "attention, qkv, x2": named("qkv", "x2"),
        "attention, gate_up": named("gate_up"),
        "attention, x2, gate_up": named("x2", "gate_up"),
        "attention, qkv, x2, gate_up": named("qkv", "x2", "gate_up"),
        "dots, attention": both(is_attention, built_in.dots_with_no_batch_dims_saveable),
    }
    if tiny:
        return {name: found[name] for name in ("nothing", "attention, qkv, x2, gate_up")}
    return found if long else {**found, "dots": built_in.dots_with_no_batch_dims_saveable, "everything": None}


def compiled(f: Callable[..., Any], args: tuple) -> tuple[Any, int]:
    """The step, value and gradient, and its temporary bytes."""
    step = jax.jit(jax.value_and_grad(f, (0, 1)), compiler_options=dict(memjax.remat_compiler_options()))
    program = step.lower(*args).compile()
    memory: Any = program.memory_analysis()
    return program, memory.temp_size_in_bytes


def by_turns(programs: list[Any], args: tuple, runs: int) -> list[float | None]:
    """The median milliseconds of each program; None for one that does not fit the device."""
    times: list[list[float]] = [[] for _ in programs]
    fits = [True] * len(programs)
    for turn in range(runs + 1):
        for i, program in enumerate(programs):
            if not fits[i]:
                continue
            start = time.perf_counter()
            try:
                jax.block_until_ready(program(*args))
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                fits[i] = False
                continue
            if turn:
                times[i].append(1e3 * (time.perf_counter() - start))
    return [sorted(found)[len(found) // 2] if fit else None for found, fit in zip(times, fits, strict=True)]


def table(shape: Shape, kind: str, config: Config) -> None:
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    keys = jax.random.split(jax.random.key(0), shape.layers + 1)
    stack: Any = [jax.jit(parameters, static_argnums=0)(shape, key) for key in keys[1:]]
    if kind == "scanned":
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack)
    x = jax.random.normal(keys[0], (shape.batch, shape.length, shape.width), jnp.bfloat16)
    args = (stack, x)
    plain = functools.partial(layer, implementation=implementation)
    unchanged = functools.partial(loss, kind=kind, layer=plain)

    def planned(budget: int) -> dict[str, Any]:
        start = time.perf_counter()
        if kind == "chain":
            blocks = [plain] * shape.layers
            plan = memjax.remat.chain_plan(blocks, *args, budget=budget)
            f = lambda stack, x: squares(memjax.remat.chain(blocks, stack, x, schedule=plan))
        else:
            plan = memjax.plan(unchanged, *args, budget=budget, argnums=(0, 1))
            f = memjax.planned(unchanged, plan=plan)
        seconds = time.perf_counter() - start
        program, nbytes = compiled(f, args)
        return {
            "program": program,
            "planned_bytes": nbytes,
            "first_predicted_bytes": getattr(plan, "first_nbytes", plan.nbytes),
            "predicted_ratio": round(plan.seconds / plan.plain_seconds, 4),
        } | ({"planning_seconds": round(seconds, 2)} if config.workers == 1 else {})

    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append({"kind": kind, "tokens": shape.tokens, "layers": shape.layers} | row)
        print(json.dumps(rows[-1]), flush=True)
        if not config.tiny:
            record.save(f"plan_{kind}_{shape.tokens}", rows)

    def prepared(policy: Any) -> tuple[Any, int, dict[str, Any]]:
        block = plain if policy is None else jax.checkpoint(plain, policy=policy)
        program, nbytes = compiled(functools.partial(loss, kind=kind, layer=block), args)
        try:
            return program, nbytes, planned(nbytes)
        except ValueError as error:  # less than the least possible
            return program, nbytes, {"error": str(error)}

    chosen = policies(shape.tokens > 100_000, config.tiny)
    if config.policies:
        chosen = {name: chosen[name] for name in config.policies}
    with ThreadPoolExecutor(config.workers) as pool:
        # All at once where there are workers, for no program may run while others are compiled.
        found = list(pool.map(prepared, chosen.values())) if config.workers > 1 else map(prepared, chosen.values())
        for name, (program, nbytes, plan) in zip(chosen, found, strict=True):
            if "error" in plan:
                add({"policy": name, "bytes": nbytes, "ms": by_turns([program], args, shape.runs)[0]} | plan)
                continue
            by_hand, ms = by_turns([program, plan.pop("program")], args, shape.runs)
            add({"policy": name, "bytes": nbytes, "ms": by_hand, "planned_ms": ms} | plan)
        if config.between:
            budgets = sorted(row["bytes"] for row in rows)
            middles = [(low + high) // 2 for low, high in itertools.pairwise(budgets)]
            for middle, plan in zip(middles, list(pool.map(planned, middles)), strict=True):
                [ms] = by_turns([plan.pop("program")], args, shape.runs)
                add({"policy": None, "bytes": middle, "planned_ms": ms} | plan)


def main(config: Config) -> None:
    shapes = TINY if config.tiny else [shape for shape in SHAPES if shape.tokens in config.tokens]
    for shape, kind in itertools.product(shapes, config.kinds):
        table(shape if config.runs is None else dataclasses.replace(shape, runs=config.runs), kind, config)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
