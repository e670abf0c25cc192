"""METP and its peers on the GPUs of one machine: `python -m benchmarks.metp`, about four minutes on four of them.

- memory: peak memory of a Transformer layer's forward and backward pass with each parallelism, in a process each;
- overlap: time of a feed-forward layer's ring, of its matmuls alone and of its hops alone, against tokens per device, beside
  the predictions of `memjax.shard.overlap`;
- attention: causal zigzag ring attention beside flash attention of the same number of tokens on one GPU;
- feed_forward: a gated feed-forward layer beside the same layer on one GPU, with its share of the tokens and whole weights.

Each writes a file, `benchmarks/results/metp_memory.json` for one, with `--steps 8` metp_overlap_8.json.

`--tokens 512 --dim 64 --heads 4 --hidden 128 --sizes 2 --overlap-tokens 64 --link-sizes 1024 4096
--attention-tokens 256` tries it on simulated CPU devices.
"""

import dataclasses
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from benchmarks import record
from benchmarks.cases import metp_feed_forward, metp_overlap
from experiments.models import parallel
from experiments.models.transformer import Layer, TransformerConfig, _specs
from memjax.shard import baselines, metp_attention

memjax.shard.hide_hops()


@dataclasses.dataclass(frozen=True)
class Config:
    """The default is a layer of a model with seven billion parameters."""

    tokens: int = 65536
    dim: int = 4096
    heads: int = 32
    hidden: int = 11008
    kinds: tuple[str, ...] = ("memory", "overlap", "attention", "feed_forward")
    sizes: tuple[int, ...] = (2, 4)
    """GPUs of the rings whose memory is measured."""
    parallelisms: tuple[str, ...] = ("metp", "tp")
    overlap_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Tokens per device in overlap."""
    link_sizes: tuple[int, ...] = (2**20, 2**23, 2**25, 2**27, 2**29)
    """Bytes of messages whose bandwidth is measured."""
    attention_tokens: int = 131072
    """Tokens of the whole sequence in attention."""
    steps: int | None = None
    """Steps of the ring in overlap and attention, if there are more than GPUs. Blocks then travel between fewer devices than the
    ring has, as many and as large as in the ring. Times are those of such a ring, results are not."""
    repeats: int = 8
    name: str = ""
    """Added to the names of the files of results."""
    timeout: float = 90.0
    """Seconds that one measurement may take."""
    time_limit: float = 120.0
    """Start nothing after this many seconds."""


def main(config: Config) -> None:
    begin = time.monotonic()
    rows: dict[str, list[dict]] = {kind: [] for kind in config.kinds}
    late = lambda: time.monotonic() - begin > config.time_limit
    base = dataclasses.asdict(config)
    gpu = record._accelerator() is not None
    most = max(config.sizes)

    def run(kind: str, size: int, first: int = 0, **options: Any) -> dict:
        case = {**base, **options, "kind": kind, "size": size}
        environ = {"CUDA_VISIBLE_DEVICES": ",".join(str(first + i) for i in range(size))}
        if not gpu:
            environ = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={size}"}
        return record.in_fresh_process("benchmarks.metp", case, environ=environ, timeout=config.timeout)

    def keep(result: dict) -> None:
        sizes = ("tokens", "dim", "steps") if config.steps else ("tokens", "dim")
        row = {key: value for key, value in result.items() if key not in base or key in sizes}
        rows[row["kind"]].append(row)
        print(json.dumps(row), flush=True)
        name = (
            f"metp_{row['kind']}" + (f"_{config.steps}" if config.steps else "") + (config.name and f"_{config.name}")
        )
        record.save(name, rows[row["kind"]])

    for size in sorted(config.sizes) if "memory" in config.kinds else ():
        # Rings that fit side by side run side by side.
        with ThreadPoolExecutor(max(most // size, 1)) as pool:
            jobs = [
                pool.submit(run, "memory", size, (i % max(most // size, 1)) * size, parallelism=name)
                for i, name in enumerate(config.parallelisms)
            ]
            for job in jobs:
                keep(job.result())
    for kind in ("overlap", "attention", "feed_forward"):
        if kind in config.kinds and not late():
            keep(run(kind, most))


def case(case: dict) -> dict:
    """One measurement, in its own process."""
    devices = np.asarray(jax.devices()[: case["size"]]).reshape(1, -1)
    mesh = Mesh(devices, ("data", "ring"))
    case["steps"] = case["steps"] or case["size"]
    kinds = {
        "memory": _memory,
        "overlap": metp_overlap.measure,
        "attention": _attention,
        "feed_forward": metp_feed_forward.measure,
    }
    return kinds[case["kind"]](case, mesh)


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


def _attention(case: dict, mesh: Mesh) -> dict:
    size, heads, tokens = case["steps"], case["heads"], case["attention_tokens"]
    head_dim = case["dim"] // heads
    shape = (1, tokens // size * case["size"], heads, head_dim)
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
    with metp_overlap.ring_of(size, case["size"]):
        compiled = jax.jit(f).lower(q, q, q).compile()
    ring_rate = flops / size / _median(compiled, case["repeats"], q, q, q)
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
