"""The least memory of layers in a scan, with "offload" and without: `JAX_PLATFORMS=cpu python -m benchmarks.plan_offload`.

The layers of `benchmarks.plan`, planned with `budget="min"` for a GPU that is not there. Nothing runs. It takes `memjax[gpu]` for
the compiler, and a few minutes on two CPU cores.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.experimental import topologies

import memjax
from benchmarks import plan, record


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    target_config: pathlib.Path = pathlib.Path("memjax/_commands/gpus/h200.txtpb")
    """A file that describes the GPU."""
    name: str = "plan_offload"
    """Name of the file of results."""


def main(config: Config) -> None:
    jax.devices()  # the backend of this machine has to exist first
    text = config.target_config.read_text()
    topology: Any = topologies.get_topology_desc(
        platform="cuda", topology_name="described", topology="1x1x1", target_config=text
    )
    there = jax.sharding.SingleDeviceSharding(topology.devices[0])
    rows = []
    for shape in plan.SHAPES:
        typed = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype, sharding=there)
        one = jax.eval_shape(functools.partial(plan.parameters, shape), jax.random.key(0))
        stack = {name: typed(shape.layers, *leaf.shape, dtype=leaf.dtype) for name, leaf in one.items()}
        x = typed(shape.batch, shape.length, shape.width)
        layer = functools.partial(plan.layer, implementation="cudnn")
        loss = functools.partial(plan.loss, kind="scanned", layer=layer)
        for allow in (("recompute",), ("recompute", "offload")):
            least = memjax.plan(loss, stack, x, budget="min", allow=allow)
            rows.append(
                {
                    **{"layers": shape.layers, "batch": shape.batch, "length": shape.length, "allow": allow},
                    **{"bytes": least.compiled_nbytes, "host_bytes": least.host_nbytes, "notes": least.notes},
                    **{"machine": f"compiled for {topology.devices[0].device_kind}, not run"},
                }
            )
            print(rows[-1], flush=True)
            record.save(config.name, rows)


if __name__ == "__main__":
    main(tyro.cli(Config))
