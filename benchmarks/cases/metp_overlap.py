"""How much of METP's communication is hidden. It times a feed-forward layer's passes over a ring, their matmuls alone and their
hops alone, and finds the tokens per device from which on all could be hidden, beside the prediction of `memjax.shard.overlap`."""

import contextlib
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax.shard import _metp, metp_mlp, overlap, ring


def measure(case: dict, mesh: Mesh) -> dict:
    """Times of a feed-forward layer's forward and backward pass: over the ring, matmuls alone, and hops alone."""
    dim, size, steps = case["dim"], case["size"], case["steps"]
    hidden = 4 * dim * size // steps  # so that a device holds the same share as in a ring of so many steps
    link = overlap.measure_link(list(mesh.devices.flat), case["link_sizes"])
    rate = overlap.measure_matmul(min(8192, 2 * dim))
    rows, columns = P("ring"), P(None, "ring")
    put = lambda shape, spec: jax.jit(
        lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * jnp.bfloat16(shape[0] ** -0.5),
        out_shardings=NamedSharding(mesh, spec),
    )()
    forward = lambda x, w_in, w_out: metp_mlp(x, w_in, w_out, axis_name="ring")
    backward = lambda x, w_in, w_out: jax.vjp(forward, x, w_in, w_out)[1](x)
    passes: dict[str, Any] = {"forward": (forward, rows, False), "backward": (backward, (rows, columns, rows), True)}
    over_ring = lambda f, out: jax.shard_map(f, mesh=mesh, in_specs=(rows, columns, rows), out_specs=out)
    table = []
    for tokens in case["overlap_tokens"]:
        arrays = put((size * tokens, dim), rows), put((dim, hidden), columns), put((hidden, dim), rows)
        for name, (f, out, back) in passes.items():
            build = lambda f, out, arrays=arrays: jax.jit(over_ring(lambda *a: f(*a), out)).lower(*arrays).compile()
            with ring_of(steps, size):
                functions = {"ring": build(f, out)}
                with _instead(_hop=lambda tree, axis_name, size: jax.lax.optimization_barrier(tree)):
                    functions["matmuls"] = build(f, out)
                functions["hops"] = build(functools.partial(_hops, back), rows)
            row: dict[str, Any] = {"tokens": tokens, "pass": name}
            row |= {k: v * 1e3 for k, v in in_turn(functions, case["repeats"], arrays).items()}
            table.append(row | {"hidden": _hidden(row)})
            print(table[-1], file=sys.stderr, flush=True)
    both = [
        {"tokens": tokens, "pass": "forward + backward"}
        | {k: sum(row[k] for row in table if row["tokens"] == tokens) for k in ("ring", "matmuls", "hops")}
        for tokens in case["overlap_tokens"]
    ]
    return {
        "dim": dim,
        "flops_per_second": rate,
        "link": dict(zip(map(str, link.sizes), link.bandwidths, strict=True)),
        "milliseconds": table + [row | {"hidden": _hidden(row)} for row in both],
    }


def _hidden(row: dict) -> float:
    return (row["matmuls"] + row["hops"] - row["ring"]) / min(row["matmuls"], row["hops"])


def full_overlap_tokens(row: dict) -> dict[str, dict[str, float | None]]:
    """By pass of a measured row, the tokens per device from which on hops can be hidden: measured, predicted with the rate of a
    large matmul, and predicted with the rate of the layer's matmuls and the work around them ("own matmuls")."""
    link = overlap.Link(tuple(map(int, row["link"])), tuple(row["link"].values()))
    steps = row.get("steps", row["size"])
    shaped = {"dim": row["dim"], "hidden": 4 * row["dim"], "size": steps}
    tokens = {}
    for name in ("forward", "backward"):
        times = [r for r in row["milliseconds"] if r["pass"] == name]
        step: Any = functools.partial(overlap.mlp_step, **shaped, backward=name == "backward")
        rate = steps * step(times[-1]["tokens"]).flops / (times[-1]["matmuls"] / 1e3)
        predict = functools.partial(overlap.full_overlap_tokens, step)
        tokens[name] = {
            "measured": _crossover(times, steps),
            "large matmul": predict(row["flops_per_second"], link),
            "own matmuls": predict(rate, link),
        }
    return tokens


def _crossover(rows: list[dict], size: int) -> float | None:
    """Tokens per device at which a step's matmuls, p in all, take as long as a hop, p - 1 in all."""
    surplus = [row["matmuls"] / size - row["hops"] / (size - 1) for row in rows]
    for i, (low, high) in enumerate(itertools.pairwise(surplus)):
        if low < 0 <= high:
            few, many = rows[i]["tokens"], rows[i + 1]["tokens"]
            return few + (many - few) * -low / (high - low)
    return None


@contextlib.contextmanager
def ring_of(steps: int, size: int) -> Iterator[None]:
    """Let METP use a ring of so many steps. If it has more steps than devices, blocks go round the devices several times."""
    pairs = [(i, (i + 1) % size) for i in range(size)]
    hop = lambda tree, axis_name, size: jax.lax.ppermute(tree, axis_name, pairs)
    with _instead(_size=lambda axis_name: steps, _hop=hop) if steps != size else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _instead(**functions: Any) -> Iterator[None]:
    """Replace functions of `memjax.shard.ring`."""
    before = {name: getattr(ring, name) for name in functions}
    for name, f in functions.items():
        setattr(ring, name, f)
    yield
    for name, f in before.items():
        setattr(ring, name, f)


def _hops(back: bool, x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """The hops of a pass, in the same pieces, without its matmuls."""
    bs, c = (w_in,), w_out
    touch = lambda tree: sum(a[..., 0, :1].astype(jnp.float32) for a in jax.tree.leaves(tree))
    block = _metp._block(bs, c, 0, 1)
    if not back:
        return ring.scan(lambda seen, block, step: seen + touch(block), block, touch(block), axis_name="ring")
    count = _metp._pieces(x, bs, c)

    def body(seen: Any, block: Any, step: Any) -> Any:
        return seen + touch(block), jax.tree.map(lambda a: a.astype(jnp.float32), block)

    # Sums go on as they arrive.
    with _instead(_add=lambda arrived, more: arrived):
        piece = lambda block, i: _metp._block(block[0], block[1], i, count)
        seen, sums = ring.collect(
            body, (bs, c), touch(block), axis_name="ring", dtype=jnp.float32, count=count, piece=piece
        )
    return seen + touch(sums)


def in_turn(functions: dict[str, Any], repeats: int, args: Any, calls: int = 3) -> dict[str, float]:
    """Seconds of a call of each function: medians over rounds of several calls in a row. Each begins while the first function
    runs, so that all see the clocks of a busy GPU."""
    warm = next(iter(functions.values()))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for f in functions.values():
        jax.block_until_ready(f(*args))
    for _ in range(repeats):
        for name, f in functions.items():
            jax.block_until_ready(warm(*args))
            begin = time.perf_counter()
            for _ in range(calls):
                out = f(*args)
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - begin) / calls)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
