"""Tools on a mesh beside the same in a `shard_map` by hand: `python -m benchmarks.mesh`, about two minutes on two GPUs.

Forward and backward pass of `linear_cross_entropy` as it is by default, and of a feed-forward layer with `memjax.remat.tiled`,
tokens sharded: time, and bytes of a device

- by hand: inside `jax.shard_map`, where functions see a device's own tokens;
- automatic: under `jit`, the mesh's axes automatic;
- explicit: under `jit`, the mesh's axes explicit, as `jax.make_mesh` makes them.

With `--tools vocabulary` tokens are whole, and devices hold entries of a table that is both embedding and head. Plain JAX with
automatic axes is beside it, and PyTorch where it is installed.

`--tokens 256 --dim 64 --vocabulary 512 --hidden 128 --seconds 0.1 --devices 2` tries it on simulated CPU devices.
`--target h200.txtpb` compiles for GPUs that need not be there, as `benchmarks.metp_compiled` does, and times nothing.
"""

import dataclasses
import importlib.util
import json
import pathlib
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

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

_SENT = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


@dataclasses.dataclass(frozen=True)
class Config:
    devices: int = 2
    tokens: int = 32768
    """Tokens of all devices together."""
    dim: int = 4096
    vocabulary: int = 128256
    hidden: int = 14336
    tools: tuple[str, ...] = ("linear_cross_entropy", "tiled")
    seconds: float = 5.0
    """How long each way of each tool is timed, after a fifth as long that warms up."""
    target: str = ""
    name: str = "mesh"


def main(config: Config) -> None:
    rows: list[dict] = []
    simulated = bool(config.target) or record._accelerator() is None
    environ = {"JAX_PLATFORMS": "cpu"} if simulated else {}
    if simulated:
        environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={config.devices}"
    for tool in config.tools:
        result = record.in_fresh_process("benchmarks.mesh", {**dataclasses.asdict(config), "tool": tool}, environ)
        rows += result.get("rows") or [{"tool": tool, "error": result["error"]}]
        if tool == "vocabulary" and not config.target and importlib.util.find_spec("torch") is not None:
            result = record.in_fresh_process("benchmarks.cases.vocabulary_torch", dataclasses.asdict(config))
            rows += result.get("rows") or [{"tool": tool, "how": "PyTorch", "error": result["error"]}]
        print(*map(json.dumps, rows), sep="\n", flush=True)
        print(record.save(config.name, rows))


def case(config: Config, tool: str) -> dict:
    steps: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for how in ("by hand", "automatic", "explicit", *(("plain JAX",) if tool == "vocabulary" else ())):
        try:
            steps[how] = _compiled(config, tool, how)
            print(how, "is compiled", file=sys.stderr, flush=True)
        except Exception as error:  # one way that fails must not hide the others
            rows.append({"tool": tool, "how": how, "error": f"{type(error).__name__}: {str(error)[:300]}"})
    times = (
        {} if config.target or not steps else _times({how: call for how, (_, call) in steps.items()}, config.seconds)
    )
    for how, (compiled, _) in steps.items():
        memory, text = compiled.memory_analysis(), compiled.as_text()
        rows.append(
            {
                "tool": tool,
                "how": how,
                "devices": config.devices,
                "temp_bytes": memory.temp_size_in_bytes,
                "output_bytes": memory.output_size_in_bytes,
                **({"ms": statistics.median(times[how]), "calls": len(times[how])} if times else {}),
                "sent": dict(Counter(_SENT.findall(text))),
                "kernels": text.count('custom_call_target="mosaic_gpu') + text.count('custom_call_target="triton'),
            }
        )
    return {"rows": rows}


def _compiled(config: Config, tool: str, how: str) -> tuple[Any, Callable[[], Any]]:
    """The compiled step, and a call of it."""
    mesh = _mesh(config, AxisType.Explicit if how == "explicit" else AxisType.Auto)
    if tool == "vocabulary":
        loss, shapes = _vocabulary(config, how)
    else:
        loss, shapes = (_loss if tool == "linear_cross_entropy" else _layer)(config, how == "by hand")
    if how == "by hand":
        specs = tuple(spec for *_, spec in shapes)
        loss = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    step = jax.value_and_grad(loss, argnums=tuple(i for i, (_, dtype, _) in enumerate(shapes) if dtype != jnp.int32))
    structs = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, spec)) for s, d, spec in shapes]
    with jax.set_mesh(mesh):
        lowered = jax.jit(step).trace(*structs).lower(lowering_platforms=("cuda",) if config.target else None)
        # As the tools are meant to be compiled: what is computed twice stays so.
        compiled = lowered.compile(memjax.remat_compiler_options())
    arrays: list[Any] = []

    def call() -> Any:
        if not arrays:
            arrays.extend(_filled(i, struct) for i, struct in enumerate(structs))
        return compiled(*arrays)

    return compiled, call


def _mesh(config: Config, kind: AxisType) -> Mesh:
    devices = jax.devices()
    if config.target:
        described = pathlib.Path(config.target).read_text()
        topology = f"1x1x{config.devices}"
        devices = topologies.get_topology_desc(
            platform="cuda", topology_name="described", topology=topology, target_config=described
        ).devices
    return Mesh(np.asarray(devices[: config.devices]), ("d",), axis_types=(kind,))


def _filled(seed: int, struct: Any) -> jax.Array:
    key = jax.random.key(seed)
    if struct.dtype == jnp.int32:
        array = jax.random.randint(key, struct.shape, 0, 256)
    else:
        array = jax.random.normal(key, struct.shape, struct.dtype) / struct.shape[-1] ** 0.5
    return jax.device_put(array, struct.sharding)


def _loss(config: Config, by_hand: bool) -> tuple[Any, list[Any]]:
    def loss(x: Any, w: Any, labels: Any) -> Any:
        return memjax.linear_cross_entropy(x, w, labels, token_axis_name="d" if by_hand else None)

    tokens, bfloat16 = (1, config.tokens), jnp.bfloat16
    shapes = [((*tokens, config.dim), bfloat16, P(None, "d")), ((config.vocabulary, config.dim), bfloat16, P())]
    return loss, [*shapes, (tokens, jnp.int32, P(None, "d"))]


def _vocabulary(config: Config, how: str) -> tuple[Any, list[Any]]:
    """Tokens are embedded, and their loss is taken, with one table, of which each device holds some entries."""

    def embedded(table: Any, tokens: Any) -> Any:
        if how == "explicit":
            return table.at[tokens].get(out_sharding=P())
        if how != "by hand":
            return table[tokens]
        here = tokens - jax.lax.axis_index("d") * table.shape[0]
        mine = (here >= 0) & (here < table.shape[0])
        return jax.lax.psum(jnp.where(mine[..., None], table[jnp.where(mine, here, 0)], 0), "d")

    def loss(x: Any, table: Any, tokens: Any) -> Any:
        x, labels = x + embedded(table, tokens), jnp.roll(tokens, -1, 1)
        if how == "plain JAX":
            logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return memjax.linear_cross_entropy(x, table, labels, axis_name="d" if how == "by hand" else None)

    tokens, bfloat16 = (1, config.tokens), jnp.bfloat16
    shapes = [((*tokens, config.dim), bfloat16, P()), ((config.vocabulary, config.dim), bfloat16, P("d"))]
    return loss, [*shapes, (tokens, jnp.int32, P())]


def _layer(config: Config, by_hand: bool) -> tuple[Any, list[Any]]:
    def layer(gate: Any, up: Any, down: Any, x: Any) -> Any:
        return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def loss(gate: Any, up: Any, down: Any, x: Any) -> Any:
        y = memjax.remat.tiled(layer, in_axes=(None, None, None, 1), out_axes=1)(gate, up, down, x)
        mean = jnp.mean(y.astype(jnp.float32) ** 2)
        return jax.lax.pmean(mean, "d") if by_hand else mean

    wide = ((config.dim, config.hidden), jnp.bfloat16, P())
    narrow = ((config.hidden, config.dim), jnp.bfloat16, P())
    return loss, [wide, wide, narrow, ((1, config.tokens, config.dim), jnp.bfloat16, P(None, "d"))]


def _times(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of calls that take turns, so that what changes with time changes for all."""
    times: dict[str, list[float]] = {how: [] for how in calls}

    def turn() -> None:
        for how, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            times[how].append((time.perf_counter() - began) * 1e3)

    for share in (0.2, 1.0):
        times |= {how: [] for how in calls}
        end = time.perf_counter() + share * seconds * len(calls)
        while time.perf_counter() < end or min(map(len, times.values())) < 3:
            turn()
    return times


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        given = json.loads(sys.argv[2])
        tool = given.pop("tool")
        print(json.dumps(case(Config(**given), tool)))
    else:
        main(tyro.cli(Config, description=__doc__))
