"""A recurrent actor and critic over long rollouts, planned and in chunks by hand: `python -m benchmarks.recurrent`.

The network is that of recurrent PPO: an embedding, a GRU over time, two heads. By hand a chunk of time is a `jax.checkpoint` in a
scan over chunks. Plans may recompute and tile; nothing is chosen by hand. `--small` tries the benchmark.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax import lax

import memjax
from benchmarks import record


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    length: int = 512
    batch: int = 256
    observation: int = 128
    hidden: int = 512
    actions: int = 16
    chunks: tuple[int, ...] = (8, 32, 128)
    """Steps of a chunk by hand."""
    shares: tuple[float, ...] = (0.5, 0.25, 0.1, 0.07, 0.05)
    """Budgets of plans, of the plain temporary bytes."""
    rounds: int = 7
    name: str = "recurrent"
    """Name of the file of results."""
    small: bool = False


Parameters = dict[str, Any]


def cell(p: Parameters, h: Any, x: Any) -> tuple[Any, Any]:
    """One step of a GRU."""
    of_x, of_h = (jnp.split(z, 3, -1) for z in (x @ p["wi"], h @ p["wh"]))
    r, z = (jax.nn.sigmoid(of_x[i] + of_h[i]) for i in range(2))
    h = (1 - z) * jnp.tanh(of_x[2] + r * of_h[2]) + z * h
    return h, h


def losses(p: Parameters, h: Any, batch: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """What a recurrent network over these steps ends with, and the sum of its losses."""
    observations, actions, returns = batch
    h, hs = lax.scan(functools.partial(cell, p), h, jax.nn.relu(observations @ p["embed"]))
    policy = jax.nn.log_softmax(jax.nn.relu(hs @ p["actor"]) @ p["policy"])
    value = (jax.nn.relu(hs @ p["critic"]) @ p["value"])[..., 0]
    chosen = jnp.take_along_axis(policy, actions[..., None], -1)[..., 0]
    advantage = lax.stop_gradient(returns - value)
    entropy = -jnp.sum(jnp.exp(policy) * policy, -1)
    return h, jnp.sum(-chosen * advantage + 0.5 * (returns - value) ** 2 - 0.01 * entropy)


def start(p: Parameters, batch: tuple[Any, Any, Any]) -> Any:
    return jnp.zeros((batch[0].shape[1], p["wh"].shape[0]))


def plain(p: Parameters, batch: tuple[Any, Any, Any]) -> Any:
    return losses(p, start(p, batch), batch)[1] / batch[1].size


def by_hand(chunk: int, p: Parameters, batch: tuple[Any, Any, Any]) -> Any:
    parts = jax.tree.map(lambda a: a.reshape(-1, chunk, *a.shape[1:]), batch)
    _, sums = lax.scan(jax.checkpoint(functools.partial(losses, p)), start(p, batch), parts)
    return sums.sum() / batch[1].size


def ways(config: Config, nbytes: int, beside: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Gradients, jitted: `nbytes` are temporary ones of the plain one, and `beside` those of its arguments and results."""
    jitted = lambda f: jax.jit(jax.value_and_grad(f), compiler_options=memjax.remat_compiler_options())
    for chunk in config.chunks:
        yield {"way": "by hand", "chunk": chunk}, jitted(functools.partial(by_hand, chunk))
    allow = "recompute", "tile"
    for share in config.shares:
        budget = int(share * nbytes)
        row = {"share": share, "budget": budget}
        yield {"way": "planned", **row}, jitted(memjax.planned(plain, budget=budget, allow=allow))
        yield {"way": "jit", **row}, memjax.jit(jax.value_and_grad(plain), budget=beside + budget, allow=allow)


def main(config: Config) -> None:
    if config.small:
        config = dataclasses.replace(config, length=128, batch=4, observation=8, hidden=16, rounds=2)
    keys = iter(jax.random.split(jax.random.key(0), 20))
    hidden, normal = config.hidden, lambda *shape: jax.random.normal(next(keys), shape)
    shapes = {"embed": (config.observation, hidden), "wi": (hidden, 3 * hidden), "wh": (hidden, 3 * hidden)}
    shapes |= {
        "actor": (hidden, hidden),
        "policy": (hidden, config.actions),
        "critic": (hidden, hidden),
        "value": (hidden, 1),
    }
    p = {name: normal(*shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    steps = config.length, config.batch
    actions = jax.random.randint(next(keys), steps, 0, config.actions)
    batch = normal(*steps, config.observation), actions, normal(*steps)
    options: dict[str, Any] = {**memjax.remat_compiler_options()}
    first = jax.jit(jax.value_and_grad(plain)).lower(p, batch).compile(options)
    memory: Any = first.memory_analysis()
    nbytes, beside = memory.temp_size_in_bytes, memory.argument_size_in_bytes + memory.output_size_in_bytes
    runs: list[tuple[dict[str, Any], Any]] = [({"way": "plain", "temp": nbytes}, first)]
    for row, f in ways(config, nbytes, beside):
        begun = time.perf_counter()
        try:
            program = f.lower(p, batch).compile()
        except ValueError as error:
            print(row, str(error)[:300])
            continue
        row |= {"temp": program.memory_analysis().temp_size_in_bytes, "compile_s": time.perf_counter() - begun}
        runs.append((row, program))
    wanted = first(p, batch)[1]
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(config.rounds + 1):
        for (row, program), taken in zip(runs, times, strict=True):
            begun = time.perf_counter()
            _, gradient = jax.block_until_ready(program(p, batch))
            taken.append(time.perf_counter() - begun)
            off = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), gradient, wanted)
            row["off"] = max(off.values())
    for (row, _), taken in zip(runs, times, strict=True):
        ratios = [one / other for one, other in zip(taken[1:], times[0][1:], strict=True)]
        row |= {"ms": statistics.median(taken[1:]) * 1e3, "ratio": statistics.median(ratios)}
        row["of_plain"] = row["temp"] / nbytes
        print(json.dumps(row))
    if not config.small:
        record.save(config.name, [row for row, _ in runs])


if __name__ == "__main__":
    main(tyro.cli(Config))
