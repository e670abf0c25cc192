"""Memory of long sequences compiled for GPUs that need not be there:

    python -m benchmarks.long_context_compiled --target h200.txtpb

Temporaries of loss and gradient of whole decoders in the shapes of Llama 3, of one layer forward and backward, and of a decoder
over a ring of eight, from the compiler. It takes JAX's CUDA plugin, and of the GPU a description as
`--xla_gpu_target_config_filename` takes it. `--smoke` compiles tiny ones for simulated CPU devices and saves nothing.
"""

import dataclasses
import functools
import json
import os
import pathlib
import sys
from typing import Any, Literal

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import record
from benchmarks.long_context import shape
from experiments.models import llama
from experiments.models.recipe import parse

Part = Literal["whole", "layer", "ring"]
_M = 2**20


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = ""
    """A description of the GPU."""
    parts: tuple[Part, ...] = ("whole", "layer", "ring")
    ring: int = 8
    """Devices of the ring."""
    ring_cases: tuple[str, ...] = ()
    """Shape, tokens and recipe of each decoder over the ring, as `--real-cases` of `benchmarks.long_context`. Default: three
    lengths of the 8B shape. Given, the name of results has the number of devices."""
    smoke: bool = False


def cases(config: Config) -> dict[Part, list[dict]]:
    kept = ("groups+slots=4", "groups+slots=4+keep_attention", "groups+slots=3")
    whole = [("1B", f"tiled+{r}", n) for r in kept for n in (_M // 4, _M)] + [("1B", f"tiled+{kept[0]}", 2 * _M)]
    whole += [("8B", f"tiled+{r}", n) for r in kept for n in (_M // 4, _M)]
    whole += [("8B", "tiled+groups+slots=8+bits=4", n) for n in (_M // 4, _M)]
    whole += [("8B", "checkpoint", _M // 8), ("8B", "tiled+groups+slots=4", 5 * _M // 4)]
    layer = [
        ("8B", r, n)
        for r in (
            "plain",
            "tiled+plain",
            "tiled+groups+plain",
            "tiled=8192+groups+plain",
            "tiled=8192+groups+plain+keep_attention",
        )
        for n in (_M // 8, _M // 2)
    ]
    ring = [("8B", "tiled+groups+slots=4", n * config.ring) for n in (_M // 2, _M, 5 * _M // 4)]
    if config.ring_cases:
        ring = [(shape, recipe, int(tokens)) for shape, tokens, recipe in map(str.split, config.ring_cases)]
    parts: dict[Part, list[tuple[str, str, int]]] = {"whole": whole, "layer": layer, "ring": ring}
    if config.smoke:
        tiny = [("tiny", "tiled=32+groups+slots=2", 256)]
        parts = {"whole": tiny, "layer": [("tiny", "tiled=32+groups+plain", 256)], "ring": tiny}
    names = ("shape", "recipe", "tokens")
    return {part: [dict(zip(names, case, strict=True)) for case in parts[part]] for part in config.parts}


def main(config: Config) -> None:
    for part, shapes in cases(config).items():
        size = config.ring if part == "ring" else 1
        rows = []
        for named in shapes:
            case = {"part": part, "devices": size, **named}
            environ = {} if config.target else {"XLA_FLAGS": f"--xla_force_host_platform_device_count={size}"}
            passed = {**case, "target": config.target}
            row = record.in_fresh_process("benchmarks.long_context_compiled", passed, environ=environ)
            rows.append({name: value for name, value in row.items() if name != "target"})
            print(json.dumps(rows[-1]), flush=True)
            if not config.smoke:
                given = f"_{size}" if part == "ring" and config.ring_cases else ""
                record.save(f"long_context_compiled_{part}{given}", rows)


def case(case: dict) -> dict:
    size, target = case["devices"], case.pop("target")
    devices = jax.devices()
    if target:
        devices = topologies.get_topology_desc(
            platform="cuda",
            topology_name="described",
            topology=f"1x1x{size}",
            target_config=pathlib.Path(target).read_text(),
        ).devices
    mesh = Mesh(np.asarray(devices[:size]), ("ring",))
    step, args = (_layer if case["part"] == "layer" else _decoder)(case, mesh)
    lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda" if target else "cpu",))
    memory: Any = lowered.compile().memory_analysis()
    temp = memory.temp_size_in_bytes
    return {
        "device": devices[0].device_kind,
        **case,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": temp,
        "kib_per_local_token": temp / 1024 / (case["tokens"] / size),
        "gib": (memory.argument_size_in_bytes + memory.output_size_in_bytes + temp) / 2**30,
    }


def _decoder(case: dict, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Loss and gradient. In a ring each device has its part of the sequence and of the parameters."""
    config, recipe = _config(case), parse(case["recipe"])
    params = jax.eval_shape(functools.partial(llama.init, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, case["tokens"]), jnp.int32)
    if case["devices"] == 1:
        step = jax.value_and_grad(functools.partial(llama.loss, config, recipe))
        return step, _placed((params, tokens, tokens), PartitionSpec(), mesh)
    loss = functools.partial(llama.loss, config, recipe, axis_name="ring")
    specs = llama.shards(params, "ring"), PartitionSpec(None, "ring"), PartitionSpec(None, "ring")
    step = jax.shard_map(jax.value_and_grad(loss), mesh=mesh, in_specs=specs, out_specs=(PartitionSpec(), specs[0]))
    placed = (_placed(tree, spec, mesh) for tree, spec in zip((params, tokens, tokens), specs, strict=True))
    return step, tuple(placed)


def _layer(case: dict, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """One layer, forward and backward, for a cotangent of its result."""
    config, recipe = dataclasses.replace(_config(case), layers=1), parse(case["recipe"])
    params = jax.eval_shape(functools.partial(llama.init, config), jax.random.key(0))["layers"]
    p = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params)
    x = jax.ShapeDtypeStruct((1, case["tokens"], config.dim), config.dtype)
    step = lambda p, x, ct: jax.vjp(functools.partial(llama.layer, config, recipe), p, x)[1](ct)
    return step, _placed((p, x, x), PartitionSpec(), mesh)


def _config(case: dict) -> llama.LlamaConfig:
    return dataclasses.replace(shape(case["shape"]), kernel="fused")


def _placed(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Types with shardings. `specs` is one for all leaves, or a tree of them."""
    if isinstance(specs, PartitionSpec):
        specs = jax.tree.map(lambda _: specs, tree)
    place = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
    return jax.tree.map(place, tree, specs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Config, description=__doc__))
