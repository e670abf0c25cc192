"""METP's feed-forward layer on eight simulated devices beside `memjax.jit` of the plain one: bytes and FLOPs of a device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from benchmarks.cases.compiled_work import work
from memjax._jit.candidates import held_bytes
from memjax.shard import hide_hops, metp_mlp

NAME, DEVICES = "METP, 8 devices", 8
ENVIRON = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}


def measure() -> dict[str, Any]:
    hide_hops()
    mesh = Mesh(np.asarray(jax.devices()[:DEVICES]), ("ring",))
    rows, columns, weights = P("ring"), P(None, "ring"), P("ring")
    shaped = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    tokens, width, hidden = 8192, 256, 1024
    params = {"in": shaped((width, hidden), columns), "out": shaped((hidden, width), weights)}
    args = params, shaped((tokens, width), rows)
    ring = functools.partial(metp_mlp, axis_name="ring")
    mapped: Any = jax.shard_map(ring, mesh=mesh, in_specs=(rows, columns, weights), out_specs=rows)
    loss_by = lambda layer: lambda p, x: jnp.sum(layer(x, p["in"], p["out"]) ** 2)
    plain = loss_by(lambda x, a, b: jax.nn.gelu(x @ a) @ b)
    gradients = jax.tree.map(lambda one: one.sharding, params)
    options: dict[str, Any] = {"out_shardings": (None, gradients)}
    options["compiler_options"] = dict(memjax.remat_compiler_options())
    compiled = lambda loss: jax.jit(jax.value_and_grad(loss), **options).lower(*args).compile()
    temp = lambda program: program.memory_analysis().temp_size_in_bytes
    flops = lambda program: work(program.as_text()).flops
    by_tool, as_it_is = compiled(loss_by(mapped)), compiled(plain)
    row: dict[str, Any] = {"tool": "metp_mlp", "bytes": temp(by_tool), "plain_bytes": temp(as_it_is), "rounds": False}
    row |= {"flops": flops(by_tool), "plain_flops": flops(as_it_is)}
    try:
        program = memjax.jit(jax.value_and_grad(plain), budget=held_bytes(by_tool), **options).lower(*args).compile()
        row["jit"] = {"bytes": temp(program), "flops": flops(program)}
    except ValueError as error:
        row["jit"] = {"refused": str(error)[:300]}
    return {"rows": [row]}
