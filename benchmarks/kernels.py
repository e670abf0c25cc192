"""Where the time of a step on a GPU goes, kernel by kernel: `python -m benchmarks.kernels`, about two minutes.

For each case: milliseconds of a call by itself and of calls one after another, milliseconds in which some kernel ran, how many
kernels there were, and the kernels by name with their milliseconds. Kernels are timed by JAX's profiler, a call at a time after
a pause, when the clocks of a GPU are higher than in calls one after another. Writes `results/kernels.json`.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import memjax
from benchmarks import cross_entropy, long_context, record
from experiments.models.densenet import densenet

Case = Literal["densenet", "loss", "plain loss", "loss in little memory", "feed forward", "feed forward, tiled"]
Made = tuple[Callable[..., Any], tuple[Any, ...]]
_SHOWN = 12  # kernels of a case that are kept by name


@dataclasses.dataclass(frozen=True)
class Config:
    cases: tuple[Case, ...] = get_args(Case)
    calls: int = 10
    name: str = "kernels"


def dense_network() -> Made:
    """The gradient of DenseNet-264 for 64 images."""
    model = densenet(264, 1000, growth_rate=48, keep="convolutions", dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    parts: Any = nnx.split(model, nnx.Param, ...)
    graph, params, state = parts

    def loss(params: Any, images: Any, labels: Any) -> Any:
        logits = nnx.merge(graph, params, state, copy=True)(images)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    images = jax.random.normal(jax.random.key(0), (64, 224, 224, 3), jnp.bfloat16)
    return jax.value_and_grad(loss), (params, images, jax.random.randint(jax.random.key(1), (64,), 0, 1000))


def head(loss: Callable[..., Any], tokens: int = 4096, dim: int = 4096) -> Made:
    """A loss with 128,256 entries, and its gradients."""
    config = cross_entropy.Config(tokens, dim, 128256)
    return cross_entropy.both_gradients(loss), config.inputs(config.tokens, config.vocabulary)


def feed_forward(recipe: str) -> Made:
    """The gradient of a feed-forward layer of Llama 3 8B's shape for 65,536 tokens."""
    return long_context.gradient_of_layer(long_context.llama.SHAPES["8B"], "feed_forward", recipe, 65536)


in_little_memory = functools.partial(memjax.linear_cross_entropy, implementation="recompute")
CASES: dict[Case, Callable[[], Made]] = {
    "densenet": dense_network,
    "loss": functools.partial(head, memjax.linear_cross_entropy),
    "plain loss": functools.partial(head, cross_entropy.plain),
    "loss in little memory": functools.partial(head, in_little_memory, 32768, 2560),
    "feed forward": functools.partial(feed_forward, "plain"),
    "feed forward, tiled": functools.partial(feed_forward, "tiled+plain"),
}


def measure(f: Callable[..., Any], args: tuple[Any, ...], calls: int) -> dict[str, Any]:
    compiled = jax.jit(f).lower(*args).compile()
    run = lambda: jax.block_until_ready(compiled(*args))
    for _ in range(3):
        run()
    alone = []
    for _ in range(calls):
        begin = time.perf_counter()
        run()
        alone.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    jax.block_until_ready([compiled(*args) for _ in range(calls)][-1])
    streamed = (time.perf_counter() - begin) / calls
    memory: Any = compiled.memory_analysis()
    return {
        "ms": 1e3 * statistics.median(alone),
        "ms_streamed": 1e3 * streamed,
        "temp_bytes": memory.temp_size_in_bytes,
        **profiled(run),
    }


def profiled(run: Callable[[], Any], calls: int = 3) -> dict[str, Any]:
    """Kernels of a call: how many, how long any ran, and the longest by name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                run()
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    lines = [line for plane in data.planes if "GPU" in plane.name for line in plane.lines if "Stream" in line.name]
    events = sorted((e.start_ns, e.duration_ns, e.name) for line in lines for e in line.events)
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    busy = end = 0.0
    for start, duration, name in events:
        by_name[name].append(duration)
        busy += max(start + duration - max(start, end), 0)
        end = max(end, start + duration)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_SHOWN]
    return {
        "ms_busy": busy / calls / 1e6,
        "kernels": len(events) // calls,
        "longest": [
            {"name": name, "count": len(times) / calls, "ms": sum(times) / calls / 1e6} for name, times in longest
        ],
    }


def main(config: Config) -> None:
    rows = []
    for name in config.cases:
        rows.append({"case": name} | measure(*CASES[name](), config.calls))
        print(json.dumps(rows[-1]), flush=True)
        record.save(config.name, rows)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
