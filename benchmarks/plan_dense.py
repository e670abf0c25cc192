"""A DenseNet of plain Flax layers under a plan, beside `memjax.remat.DenseBlock`: temporary bytes and time of value and gradient.

    python -m benchmarks.plan_dense --depth 121

Budgets are shares of what the network of `DenseBlock`s that keep "features" takes. All run in turns in one process: `ratio`
is the median, over rounds, of the time by that of `DenseBlock`. Compiling takes most of the time: about
25 minutes in all on two cores.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

import memjax
from benchmarks import record
from benchmarks.cases.gradients import relative_distance
from experiments.models.densenet import SIZES, DenseNet

_CLASSES = 1000


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    depth: int = 121
    """Depth of the DenseNet: 121, 161, 169, 201, 232 or 264."""
    blocks: tuple[int, ...] = ()
    """Layers of each block instead, with a growth rate of 32; nothing is saved."""
    batch: int = 16
    """Images."""
    size: int = 96
    """Their height and width in pixels."""
    shares: tuple[float, ...] = (1.15, 1.0)
    """Budgets, as shares of the temporary bytes of `DenseBlock`s."""
    rounds: int = 10
    """How often each is timed."""
    name: str = "plan_dense"
    """Name of the file in `benchmarks/results/`."""


class Layer(nnx.Module):
    """A layer with a bottleneck, its output beside its input."""

    def __init__(self, features: int, growth_rate: int, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.BatchNorm(n, rngs=rngs) for n in (features, 4 * growth_rate)])
        conv = lambda a, b, size: nnx.Conv(a, b, (size, size), use_bias=False, rngs=rngs)
        self.convs = nnx.List([conv(features, 4 * growth_rate, 1), conv(4 * growth_rate, growth_rate, 3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(nnx.relu(norm(y)))
        return jnp.concatenate([x, y], -1)


class Plain(nnx.Module):
    """The network of `experiments.models.densenet.DenseNet` in layers of Flax alone."""

    def __init__(self, blocks: tuple[int, ...], growth_rate: int, rngs: nnx.Rngs):
        features = 2 * growth_rate
        self.stem = nnx.Conv(3, features, (7, 7), strides=2, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.blocks: nnx.List = nnx.List()
        self.norms: nnx.List = nnx.List()
        self.transitions: nnx.List = nnx.List()
        for i, layers in enumerate(blocks):
            self.blocks.append(nnx.List([Layer(features + j * growth_rate, growth_rate, rngs) for j in range(layers)]))
            features += layers * growth_rate
            self.norms.append(nnx.BatchNorm(features, rngs=rngs))
            if i < len(blocks) - 1:
                self.transitions.append(nnx.Conv(features, features // 2, (1, 1), use_bias=False, rngs=rngs))
                features //= 2
        self.head = nnx.Linear(features, _CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm(self.stem(images))), (3, 3), strides=(2, 2), padding="SAME")
        for i, block in enumerate(self.blocks):
            for layer in block:
                x = layer(x)
            x = nnx.relu(self.norms[i](x))
            if i < len(self.transitions):
                x = nnx.avg_pool(self.transitions[i](x), (2, 2), (2, 2))
        return self.head(x.mean((1, 2)))


def loss_of(make: Callable[[], nnx.Module]) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """The loss of a network, with its new statistics beside it, and its parameters and statistics."""
    parts: Any = nnx.split(make(), nnx.Param, ...)
    graph, params, rest = parts

    def loss(params: Any, rest: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        network: Any = nnx.merge(graph, params, rest, copy=True)
        picked = jnp.take_along_axis(jax.nn.log_softmax(network(images)), labels[:, None], 1)
        new: Any = nnx.split(network, nnx.Param, ...)
        return -jnp.mean(picked), new[2]

    return loss, (params, rest)


def measure(config: Config) -> list[dict[str, Any]]:
    """A row each for `DenseBlock`s, the plain network as it is written, and its plans."""
    blocks, growth_rate = (config.blocks, 32) if config.blocks else SIZES[config.depth]
    images = jax.random.normal(jax.random.key(0), (config.batch, config.size, config.size, 3))
    data = images, jnp.arange(config.batch) % _CLASSES
    options: Any = memjax.remat_compiler_options()
    rows: list[dict[str, Any]] = []
    steps: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def add(how: str, loss: Callable[..., Any], variables: tuple[Any, Any], **more: Any) -> int:
        start = time.perf_counter()
        lowered = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*variables, *data)
        step = lowered.compile(compiler_options=options)
        steps[how] = step, (*variables, *data)
        memory: Any = step.memory_analysis()
        temp = memory.temp_size_in_bytes
        about = {"blocks": blocks, "growth_rate": growth_rate, "batch": config.batch, "size": config.size}
        rows.append(about | {"how": how, "temp": temp, "compile_s": round(time.perf_counter() - start, 1)} | more)
        print(rows[-1], flush=True)
        return temp

    special = add("DenseBlock", *loss_of(lambda: DenseNet(blocks, growth_rate, _CLASSES, rngs=nnx.Rngs(0))))
    plain, variables = loss_of(lambda: Plain(blocks, growth_rate, nnx.Rngs(0)))
    add("plain", plain, variables)
    for share in config.shares:
        start = time.perf_counter()
        try:
            plan = memjax.plan(plain, *variables, *data, budget=int(share * special))
        except ValueError as refusal:
            rows.append({"how": f"plan {share}", "refused": str(refusal)})
            print(rows[-1], flush=True)
            continue
        planning = {"share": share, "planning_s": round(time.perf_counter() - start), "tries": len(plan.tries)}
        add(f"plan {share}", memjax.planned(plain, plan=plan), variables, **planning)
    spent: dict[str, list[float]] = {how: [] for how in steps}
    gradients = {}
    for _ in range(config.rounds + 1):
        for how, (step, args) in steps.items():
            start = time.perf_counter()
            gradients[how] = jax.block_until_ready(step(*args))[1]
            spent[how].append(time.perf_counter() - start)
    for row in rows:
        if (how := row["how"]) in steps:
            ratios = [a / b for a, b in zip(spent[how][1:], spent["DenseBlock"][1:], strict=True)]
            row |= {"ms": round(1e3 * statistics.median(spent[how][1:]), 1), "ratio": statistics.median(ratios)}
            if how.startswith("plan"):
                row["gradient_error"] = float(relative_distance(gradients[how], gradients["plain"]))
            print(row, flush=True)
    return rows


if __name__ == "__main__":
    config = tyro.cli(Config, description=__doc__)
    found = measure(config)
    if not config.blocks:
        record.save(config.name, found, on_cpu=jax.default_backend() == "cpu")
