"""Memory of a feed-forward layer compiled for GPUs that need not be there:

    python -m benchmarks.metp_compiled --target h200.txtpb

Arguments, outputs and temporaries of its forward and backward pass, from the compiler. It takes JAX's CUDA plugin, and of the GPU
a description as `--xla_gpu_target_config_filename` takes it. `--target ""` compiles for as many simulated CPU devices.
"""

import dataclasses
import functools
import json
import os
import pathlib
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import record
from memjax.shard import baselines, hide_hops, metp_mlp

hide_hops()


@dataclasses.dataclass(frozen=True)
class Config:
    target: str
    size: int = 8
    dim: int = 4096
    hidden: int = 16384
    tokens: tuple[int, ...] = (65536, 524288)


def main(config: Config) -> None:
    base, rows = dataclasses.asdict(config), []
    for tokens in config.tokens:
        for name in ("metp", "tp", "tp_sp"):
            case = {**base, "tokens": tokens, "parallelism": name}
            environ = {} if config.target else {"XLA_FLAGS": f"--xla_force_host_platform_device_count={config.size}"}
            result = record.in_fresh_process("benchmarks.metp_compiled", case, environ=environ)
            rows.append({k: v for k, v in result.items() if k != "target"})
            print(json.dumps(rows[-1]), flush=True)
            record.save("metp_compiled", rows)


def case(case: dict) -> dict:
    size, dim, hidden = case["size"], case["dim"], case["hidden"]
    devices = jax.devices()
    if case["target"]:
        described = pathlib.Path(case["target"]).read_text()
        devices = topologies.get_topology_desc(
            platform="cuda", topology_name="described", topology=f"1x1x{size}", target_config=described
        ).devices
    mesh = Mesh(np.asarray(devices[:size]), ("ring",))
    layer, rows = {
        "metp": (metp_mlp, P(None, "ring")),
        "tp": (baselines.tensor_parallel_mlp, P()),
        "tp_sp": (baselines.sequence_parallel_mlp, P(None, "ring")),
    }[case["parallelism"]]
    columns = P(None, "ring")

    def local(x: Any, w_in: Any, w_out: Any, d: Any) -> Any:
        out, pull = jax.vjp(functools.partial(layer, axis_name="ring"), x, w_in, w_out)
        out, d = jax.lax.optimization_barrier((out, d))
        return out, *pull(d)

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, columns, P("ring"), rows), out_specs=(rows, rows, columns, P("ring"))
    )
    shaped = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    x = shaped((1, case["tokens"], dim), rows)
    args = x, shaped((dim, hidden), columns), shaped((hidden, dim), P("ring")), x
    lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda" if case["target"] else "cpu",))
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    parts = {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }
    hops = _hops(compiled.as_text())
    schedule = {"hops": len(hops), "hops_beside_matmuls": sum(hops)}
    return {"device": devices[0].device_kind, **parts, "bytes": sum(parts.values()), **schedule}


def _hops(text: str) -> list[bool]:
    """For each hop in the scheduled program, counted once in a loop, whether a matmul stands between its start and its end."""
    under_way, hops = {}, []
    for line in text.splitlines():
        name, _, operation = line.strip().removeprefix("ROOT ").partition(" = ")
        if "collective-permute-start(" in operation:
            under_way[name] = False
        elif "collective-permute-done(" in operation:
            hops.append(under_way.pop(operation.split("collective-permute-done(")[1].split(")")[0].split()[-1]))
        elif "gemm" in name or "__cublas" in operation or name.startswith("%dynamic_slice_fusion"):
            # The last are matmuls, too, of a part of the rows.
            under_way = dict.fromkeys(under_way, True)
    return hops


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Config, description=__doc__))
