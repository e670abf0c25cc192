"""METP and its peers on the GPUs of one machine: `python -m benchmarks.metp`, about four minutes on four of them.

- memory: peak of a Transformer layer's forward and backward pass with each parallelism, each in a process of its own;
- overlap: a feed-forward layer's ring, its matmuls alone and its hops alone, against tokens per device, beside what
  `memjax.shard.overlap` predicts;
- attention: causal zigzag ring attention beside flash attention on one GPU with as many tokens.

`--tokens 512 --dim 64 --heads 4 --hidden 128 --sizes 2 --overlap-tokens 64 --attention-tokens 256` tries it on
simulated CPU devices.
"""

import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # or nothing overlaps

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import record
from experiments.models import parallel
from experiments.models.transformer import Layer, TransformerConfig, _specs
from memjax.shard import baselines, metp_attention, metp_mlp, overlap, ring


@dataclasses.dataclass(frozen=True)
class Config:
    """By default a layer of a model with seven billion parameters."""

    tokens: int = 65536
    dim: int = 4096
    heads: int = 32
    hidden: int = 11008
    sizes: tuple[int, ...] = (2, 4)
    """GPUs of the rings whose memory is measured."""
    parallelisms: tuple[str, ...] = ("metp", "tp")
    overlap_tokens: tuple[int, ...] = (4096, 16384)
    """Per device."""
    attention_tokens: int = 131072
    """Of the whole sequence."""
    repeats: int = 8
    time_limit: float = 200.0
    """Start nothing after this many seconds."""
    name: str = "metp"


def main(config: Config) -> None:
    begin, rows = time.monotonic(), []
    late = lambda: time.monotonic() - begin > config.time_limit
    base = dataclasses.asdict(config)
    gpu = record._accelerator() is not None
    most = max(config.sizes)

    def run(kind: str, size: int, first: int = 0, **more: Any) -> dict:
        case = {**base, **more, "kind": kind, "size": size}
        environ = {"CUDA_VISIBLE_DEVICES": ",".join(str(first + i) for i in range(size))}
        if not gpu:
            environ = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={size}"}
        return record.in_fresh_process("benchmarks.metp", case, environ=environ, timeout=90)

    def keep(found: dict) -> None:
        rows.append({key: value for key, value in found.items() if key not in base or key in ("tokens",)})
        print(json.dumps(rows[-1]), flush=True)
        record.save(config.name, rows)

    for size in sorted(config.sizes):
        # Rings that fit side by side run side by side.
        with ThreadPoolExecutor(max(most // size, 1)) as pool:
            jobs = [
                pool.submit(run, "memory", size, (i % max(most // size, 1)) * size, parallelism=name)
                for i, name in enumerate(config.parallelisms)
            ]
            for job in jobs:
                keep(job.result())
    for kind in ("overlap", "attention"):
        if not late():
            keep(run(kind, most))


def case(case: dict) -> dict:
    """One measurement, in its own process."""
    devices = np.asarray(jax.devices()[: case["size"]]).reshape(1, -1)
    mesh = Mesh(devices, ("data", "ring"))
    return {"memory": _memory, "overlap": _overlap, "attention": _attention}[case["kind"]](case, mesh)


def _memory(case: dict, mesh: Mesh) -> dict:
    name = case["parallelism"]
    config = TransformerConfig(
        vocabulary=256,
        dim=case["dim"],
        layers=1,
        heads=case["heads"],
        kv_heads=case["heads"],
        hidden=case["hidden"],
        dtype="bfloat16",
        parallelism=name,
    )
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Layer(config, rngs=nnx.Rngs(0))))
    specs = _specs(shapes)
    rows = P(*parallel.tokens_spec(name), None)

    def make(shape: tuple[int, ...], dtype: Any, spec: P, scale: float = 1.0) -> jax.Array:
        fill = lambda: (jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * jnp.bfloat16(scale)).astype(dtype)
        return jax.jit(fill, out_shardings=NamedSharding(mesh, spec))()

    params = jax.tree.map(lambda a, s: make(a.shape, a.dtype, s, case["dim"] ** -0.5), shapes, specs)
    x = make((1, case["tokens"], case["dim"]), jnp.bfloat16, rows)

    def local(params: Any, x: jax.Array, d: jax.Array) -> Any:
        layer = lambda params, x: nnx.merge(graph, params)(x)
        out, pull = jax.vjp(layer, params, x)
        out, d = jax.lax.optimization_barrier((out, d))
        return out, *pull(d)

    step = jax.shard_map(local, mesh=mesh, in_specs=(specs, rows, rows), out_specs=(rows, specs, rows))
    compiled = jax.jit(step).lower(params, x, x).compile()
    memory: Any = compiled.memory_analysis()
    seconds = _median(compiled, case["repeats"], params, x, x)
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    return {
        "peak_bytes": max(s.get("peak_bytes_in_use", 0) for s in stats),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "milliseconds": seconds * 1e3,
    }


def _overlap(case: dict, mesh: Mesh) -> dict:
    """Ring, matmuls alone and hops alone of a feed-forward layer's forward, and forward and backward pass."""
    dim, hidden, size = case["dim"], 4 * case["dim"], case["size"]
    link, rate = overlap.measure_link(list(mesh.devices.flat)), overlap.measure_matmul(min(8192, 2 * dim))
    rows, columns = P("ring"), P(None, "ring")
    shaped = {"dim": dim, "hidden": hidden, "size": size}
    table = []
    for tokens in case["overlap_tokens"]:
        put = lambda shape, spec: jax.jit(
            lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * jnp.bfloat16(shape[0] ** -0.5),
            out_shardings=NamedSharding(mesh, spec),
        )()
        x, w_in, w_out = put((size * tokens, dim), rows), put((dim, hidden), columns), put((hidden, dim), rows)

        def forward(x: Any, w_in: Any, w_out: Any) -> Any:
            return metp_mlp(x, w_in, w_out, axis_name="ring")

        def both(x: Any, w_in: Any, w_out: Any) -> Any:
            out, pull = jax.vjp(forward, x, w_in, w_out)
            return pull(out)

        for name, f, outs in (("forward", forward, rows), ("forward + backward", both, (rows, columns, rows))):
            over_ring = jax.shard_map(f, mesh=mesh, in_specs=(rows, columns, rows), out_specs=outs)
            seconds = {"ring": _median(jax.jit(over_ring), case["repeats"], x, w_in, w_out)}
            with _without_hops():
                f_alone = jax.shard_map(f, mesh=mesh, in_specs=(rows, columns, rows), out_specs=outs)
                seconds["matmuls"] = _median(jax.jit(lambda *a, g=f_alone: g(*a)), case["repeats"], x, w_in, w_out)
            hops = jax.shard_map(_hops(name), mesh=mesh, in_specs=(columns, rows), out_specs=rows)
            seconds["hops"] = _median(jax.jit(hops), case["repeats"], w_in, w_out)
            hidden_part = (seconds["matmuls"] + seconds["hops"] - seconds["ring"]) / min(
                seconds["matmuls"], seconds["hops"]
            )
            table.append(
                {"tokens": tokens, "pass": name, **{k: v * 1e3 for k, v in seconds.items()}, "hidden": hidden_part}
            )
            print(table[-1], file=sys.stderr, flush=True)
    predicted = {
        name: overlap.full_overlap_tokens(functools.partial(overlap.mlp_step, **shaped, backward=b), rate, link)
        for name, b in (("forward", False), ("backward", True))
    }
    return {
        "flops_per_second": rate,
        "link": dict(zip(map(str, link.sizes), link.bandwidths, strict=True)),
        "predicted_full_overlap_tokens": predicted,
        "milliseconds": table,
    }


class _without_hops:
    """The ring's steps, each with this device's own block."""

    def __enter__(self) -> None:
        self._hop = ring._hop
        ring._hop = lambda tree, axis_name, size: jax.lax.optimization_barrier(tree)

    def __exit__(self, *_: Any) -> None:
        ring._hop = self._hop


def _hops(name: str) -> Any:
    """The messages of the passes without the work."""

    def local(w_in: jax.Array, w_out: jax.Array) -> jax.Array:
        block = (w_in, w_out)
        zero = jnp.zeros(1, jnp.float32)
        touch = lambda block: block[0][0, :1].astype(jnp.float32)
        total, _ = ring.scan(
            lambda carry, block, step: (carry + touch(block), None), block, touch(block), axis_name="ring"
        )
        if name == "forward":
            return total
        block, total = jax.lax.optimization_barrier((block, total))
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), block)
        total, sums = ring.scan(lambda c, block, step: (c + touch(block), wide), block, total, axis_name="ring")
        return total + zero + sums[0][0, :1] + sums[1][0, :1]

    return local


def _attention(case: dict, mesh: Mesh) -> dict:
    size, heads, tokens = case["size"], case["heads"], case["attention_tokens"]
    head_dim = case["dim"] // heads
    shape = (1, tokens, heads, head_dim)
    spec = P(None, "ring")
    make = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16), out_shardings=NamedSharding(mesh, spec)
    )
    q = make()

    def gradients(f: Any) -> Any:
        def both(q: Any, k: Any, v: Any) -> Any:
            out, pull = jax.vjp(f, q, k, v)
            return pull(out)

        return both

    flops = 3.5 * 2 * tokens**2 * heads * head_dim  # causal: half of the products; 2 matmuls forward, 5 backward
    over_ring = lambda q, k, v: metp_attention(q, k, v, axis_name="ring", causal=True)
    f = jax.shard_map(gradients(over_ring), mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3)
    ring_rate = flops / size / _median(jax.jit(f), case["repeats"], q, q, q)
    one = jax.random.normal(jax.random.key(0), (1, tokens // size, heads, head_dim), jnp.bfloat16)
    flash = jax.jit(gradients(lambda q, k, v: baselines.attention(q, k, v, causal=True)))
    one_rate = flops / size**2 / _median(flash, case["repeats"], one, one, one)
    return {"ring_tflops_per_gpu": ring_rate / 1e12, "flash_tflops": one_rate / 1e12, "share": ring_rate / one_rate}


def _median(f: Any, repeats: int, *args: Any) -> float:
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Config, description=__doc__))
