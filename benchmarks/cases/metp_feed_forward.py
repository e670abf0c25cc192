"""A gated feed-forward layer over a ring beside the same layer on each GPU alone, which has whole weights and sends nothing."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.cases.metp_overlap import in_turn
from memjax.shard import metp_mlp


def measure(case: dict, mesh: Mesh) -> dict:
    """Milliseconds and temporary bytes of a gradient, by way."""
    tokens, dim, hidden = case["tokens"], case["dim"], case["hidden"]
    rows, columns = P("ring"), P(None, "ring")

    def make(shape: tuple[int, ...], spec: P) -> jax.Array:
        normal = lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * jnp.bfloat16(shape[0] ** -0.5)
        return jax.jit(normal, out_shardings=NamedSharding(mesh, spec))()

    x = make((tokens, dim), rows)
    ring = lambda recompute: (
        lambda x, up, gate, down: metp_mlp(
            x, up, down, activation=jax.nn.silu, w_gate=gate, recompute=recompute, axis_name="ring"
        )
    )
    ways: dict[str, Any] = {
        "one GPU's tokens, whole weights": (alone, P(), P()),
        "METP": (ring(True), columns, rows),
        "METP, products kept": (ring(False), columns, rows),
    }
    functions, found = {}, {}
    for name, (f, wide, narrow) in ways.items():
        arguments = x, make((dim, hidden), wide), make((dim, hidden), wide), make((hidden, dim), narrow)
        specs = rows, wide, wide, narrow
        # Without checks: the gradients of whole weights are each GPU's own, and are not added up.
        step = jax.shard_map(gradient(f), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=wide != P())
        compiled = jax.jit(step).lower(*arguments).compile()
        functions[name] = lambda compiled=compiled, arguments=arguments: compiled(*arguments)
        memory: Any = compiled.memory_analysis()
        found[name] = {"temp_bytes": memory.temp_size_in_bytes}
    times = in_turn(functions, case["repeats"], ())
    return {"ways": {name: found[name] | {"milliseconds": 1e3 * times[name]} for name in ways}}


def alone(x: jax.Array, up: jax.Array, gate: jax.Array, down: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def gradient(f: Any) -> Any:
    """The gradients of everything, for a cotangent of the result that is there after it."""

    def both(*arguments: Any) -> Any:
        out, pull = jax.vjp(f, *arguments)
        out, cotangent = jax.lax.optimization_barrier((out, arguments[0]))
        return pull(cotangent)

    return both
