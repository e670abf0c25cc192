"""Transformer layers, checkpoints by hand, `memjax.compressed` and plans: `python -m benchmarks.transformer_codes`.

One gradient of a stack of layers, bfloat16, attention by cuDNN: milliseconds, temporary MiB, and the distance of the gradient
from that of the plain layers. `llama` is 8 layers of Llama 3.2 1B's shape with 4 sequences of 4,096 tokens; `llama_scanned` the
same in `jax.lax.scan`; `vit_l` the 24 layers of ViT-L/16 with 128 images, scanned; `gpt2_medium` the 24 layers of GPT-2 medium
with 16 sequences of 1,024 tokens, scanned. Plans are made for a few budgets, exact ones and ones that may keep
some of it in 8 bits. Writes `results/transformer_codes_MODEL.json` for each. About a minute for a model on
an H200, most of which compiles. On a CPU: `--tiny`, two minutes, saves nothing.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.ad_checkpoint import checkpoint_name

import memjax
from benchmarks import plan, record
from benchmarks.cases.gradients import compare

Layer = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers, one after the other, and the shape of their input."""

    layer: Layer
    parameters: Callable[[plan.Shape, jax.Array], dict[str, jax.Array]]
    shape: plan.Shape
    scanned: bool
    budgets: tuple[int, ...]
    """MiB, for plans."""


@dataclasses.dataclass(frozen=True)
class Config:
    models: tuple[str, ...] = ("llama", "llama_scanned", "vit_l", "gpt2_medium")
    bits: tuple[int, ...] = (8, 4, 3)
    policies: tuple[str, ...] = ("nothing", "attention, qkv", "attention, qkv, x2", "attention, gate_up", "all names")
    plans: tuple[str, ...] = ("exact", "8 bits")
    budgets: tuple[int, ...] = ()
    """MiB for plans; the model's own where none is given."""
    workers: int = 1
    """Plans that are made at a time."""
    rounds: int = 4
    calls: int = 3
    tiny: bool = False
    """Small layers, on a CPU."""


def stacks(tiny: bool) -> dict[str, Stack]:
    """The models by name."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    llama = functools.partial(plan.layer, implementation=implementation)
    encoder = functools.partial(_layer, implementation=implementation, causal=False)
    decoder = functools.partial(_layer, implementation=implementation, causal=True)
    wide = {"width": 1024, "hidden": 4096, "heads": 16, "kv_heads": 16}
    shapes = {
        "llama": plan.Shape(8, 4, 4096),
        "vit_l": plan.Shape(24, 128, 196, **wide),
        "gpt2_medium": plan.Shape(24, 16, 1024, **wide),
    }
    if tiny:
        shapes = dict.fromkeys(shapes, plan.Shape(2, 2, 128, width=128, hidden=512, heads=2, kv_heads=2))
    return {
        "llama": Stack(llama, plan.parameters, shapes["llama"], False, (2300, 3104, 4617, 6146)),
        "llama_scanned": Stack(llama, plan.parameters, shapes["llama"], True, (2300, 3104, 4617, 6146)),
        "vit_l": Stack(encoder, _parameters, shapes["vit_l"], True, (3500, 5430, 8238, 10230)),
        "gpt2_medium": Stack(decoder, _parameters, shapes["gpt2_medium"], True, (2300, 3485, 5386, 6687)),
    }


def _parameters(shape: plan.Shape, key: jax.Array) -> dict[str, jax.Array]:
    width, hidden = shape.width, shape.hidden
    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, hidden), "down": (hidden, width)}
    keys = jax.random.split(key, len(sizes))
    draw = lambda key, size: (jax.random.normal(key, size) * size[0] ** -0.5).astype(jnp.bfloat16)
    found = {name: draw(key, size) for key, (name, size) in zip(keys, sizes.items(), strict=True)}
    found |= {f"{name}_bias": jnp.zeros(size[1], jnp.bfloat16) for name, size in sizes.items()}
    found |= {f"norm{i}": jnp.ones(width, jnp.bfloat16) for i in (1, 2)}
    return found | {f"norm{i}_bias": jnp.zeros(width, jnp.bfloat16) for i in (1, 2)}


def _layer(p: dict[str, jax.Array], x: jax.Array, *, implementation: Any, causal: bool) -> jax.Array:
    """Layer norm before attention and before two products with a GELU between, all with biases."""
    linear = lambda name, y: y @ p[name] + p[f"{name}_bias"]
    heads = linear("qkv", _norm(p, "norm1", x)).reshape(*x.shape[:2], 3, -1, plan.HEAD)
    q, k, v = (checkpoint_name(heads[:, :, i], "qkv") for i in range(3))
    o = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)
    x = checkpoint_name(x + linear("out", o.reshape(x.shape)), "x2")
    return x + linear("down", jax.nn.gelu(checkpoint_name(linear("up", _norm(p, "norm2", x)), "gate_up")))


def _norm(p: dict[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, -1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * p[name] + p[f"{name}_bias"]


def ways(stack: Stack, config: Config) -> dict[str, Layer]:
    """What is around each layer, by name; nothing first."""
    built_in = jax.checkpoint_policies
    named = lambda *names: built_in.save_from_both_policies(plan.is_attention, built_in.save_only_these_names(*names))
    policies = {
        "nothing": built_in.nothing_saveable,
        "attention": plan.is_attention,
        "attention, qkv": named("qkv"),
        "attention, x2": named("x2"),
        "attention, qkv, x2": named("qkv", "x2"),
        "attention, gate_up": named("gate_up"),
        "all names": named("qkv", "x2", "gate_up"),
    }
    found = {"plain": stack.layer}
    found |= {f"kept: {name}": jax.checkpoint(stack.layer, policy=policies[name]) for name in config.policies}
    return found | {f"compressed, {bits} bits": memjax.compressed(stack.layer, bits=bits) for bits in config.bits}


def measure(stack: Stack, config: Config) -> list[dict[str, Any]]:
    shape = stack.shape
    keys = jax.random.split(jax.random.key(0), shape.layers + 1)
    params: Any = [jax.jit(stack.parameters, static_argnums=0)(shape, key) for key in keys[1:]]
    if stack.scanned:
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    x = jax.random.normal(keys[0], (shape.batch, shape.length, shape.width), jnp.bfloat16)
    loss = functools.partial(plan.loss, kind="scanned" if stack.scanned else "unrolled")
    gradients = {
        name: jax.grad(functools.partial(loss, layer=layer), (0, 1)) for name, layer in ways(stack, config).items()
    }
    plain = functools.partial(loss, layer=stack.layer)
    made = {name: made for name, made in plans(plain, params, x, stack, config).items() if made is not None}
    gradients |= {name: jax.grad(memjax.planned(plain, plan=one), (0, 1)) for name, one in made.items()}
    rows = compare(gradients, (params, x), rounds=config.rounds, calls=config.calls)
    return [row | _predicted(made[row["case"]]) if row["case"] in made else row for row in rows]


def plans(plain: Any, params: Any, x: jax.Array, stack: Stack, config: Config) -> dict[str, memjax.Plan | None]:
    """A plan for each budget, exact and with codes; None where nothing fits."""
    budgets = config.budgets or (stack.budgets if not config.tiny else (8, 16))

    def make(budget: int, kind: str) -> memjax.Plan | None:
        allow = ("recompute",) if kind == "exact" else ("recompute", "compress")
        try:
            return memjax.plan(plain, params, x, budget=budget * 2**20, allow=allow, argnums=(0, 1))
        except ValueError as error:
            print(f"planned, {kind}, {budget:,} MiB: {error}", flush=True)
            return None

    wanted = list(itertools.product(config.plans, budgets))
    with ThreadPoolExecutor(config.workers) as pool:
        made = list(pool.map(lambda one: make(one[1], one[0]), wanted))
    return {f"planned, {kind}, {budget:,} MiB": plan for (kind, budget), plan in zip(wanted, made, strict=True)}


def _predicted(made: memjax.Plan) -> dict[str, Any]:
    in_codes = sum(kept.bits is not None for stretch in made.stretches for kept in stretch.kept)
    return {"predicted_ms": round(made.seconds * 1e3, 2), "arrays_in_codes": in_codes}


def main(config: Config) -> None:
    for name, stack in stacks(config.tiny).items():
        if name not in config.models:
            continue
        rows = measure(stack, config)
        for row in rows:
            print(json.dumps({"model": name} | row), flush=True)
        if not config.tiny:
            sizes = {key: value for key, value in dataclasses.asdict(stack.shape).items() if key != "runs"}
            record.save(f"transformer_codes_{name}", [row | sizes for row in rows])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
