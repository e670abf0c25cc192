"""Temporary bytes of plans, predicted and compiled: `python -m benchmarks.plan_accuracy`, on a CPU, ten minutes.

Each model is planned for its least memory, for its fastest plan, and for budgets between the two. A row has the bytes that the
model of memory alone predicted for the plan that was compiled first, those that it expected for the one that was compiled last,
corrected by those before, and what the compiler took for both.

With `--target`, a description of a GPU as `--xla_gpu_target_config_filename` takes it, larger models are compiled for that GPU,
which need not be there. It takes JAX's CUDA plugin. `--models-path` adds public models, as for `benchmarks.plan_public`.
"""

import dataclasses
import functools
import importlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import topologies

import memjax
from benchmarks import plan as stack
from benchmarks import record
from benchmarks.cases.plan_public import CASES
from memjax._plan.budget.known import forget

# Tests are not type-checked.
models: Any = importlib.import_module("tests.explain.models")
networks: Any = importlib.import_module("tests.plan.networks")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to plan."""

    target: str = ""
    """A description of the GPU to compile for."""
    models_path: pathlib.Path | None = None
    """A folder with Flax's `examples` and Bonsai's `bonsai`."""
    models: tuple[str, ...] = ()
    """Which models; none: all."""
    budgets: int = 3
    """Between the least memory and that of the fastest plan."""
    save: bool = True


Case = tuple[Callable[..., Any], tuple[Any, ...]]


def small_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The models of the tests of plans and explanations."""
    rows = functools.partial(networks.inputs, jnp.float32, 4096)
    yield "layers", lambda: (networks.unrolled_loss, (networks.parameters(jnp.float32), rows()))
    yield "scan", lambda: (networks.scanned_loss, (networks.stacked(networks.parameters(jnp.float32)), rows()))
    yield "resnet", lambda: (networks.resnet_loss, (networks.resnet_parameters(), networks.images()))
    for name in ("linen_transformer", "linen_scan", "llama", "rnn", "unet", "pytree", "mixture"):
        yield name, models.MODELS[name]


def large_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The layers of `benchmarks.plan`, 16,384 tokens."""
    shape = stack.SHAPES[0]
    layer = functools.partial(stack.layer, implementation="cudnn")
    one = jax.eval_shape(functools.partial(stack.parameters, shape), jax.random.key(0))
    x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.width), jnp.bfloat16)
    stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((shape.layers, *a.shape), a.dtype), one)
    for kind, params in (("unrolled", [one] * shape.layers), ("scanned", stacked)):
        loss = functools.partial(stack.loss, kind=kind, layer=layer)
        yield f"llama_{kind}", lambda loss=loss, params=params: (loss, (params, x))  # type: ignore[misc]


def sharding(target: str) -> Any:
    """One GPU that need not be there."""
    text = pathlib.Path(target).read_text()
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="described", topology="1x1x1", target_config=text
    )
    mesh = jax.sharding.Mesh(np.asarray(described.devices[:1]), ("one",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def rows_of(name: str, case: Case, budgets: int) -> Iterator[dict[str, Any]]:
    """One row for each budget."""
    f, args = case

    def planned(budget: int | str) -> tuple[memjax.Plan, float]:
        forget()
        start = time.perf_counter()
        return memjax.plan(f, *args, budget=budget), time.perf_counter() - start

    least, most = (planned(budget)[0].nbytes for budget in ("min", "1000TiB"))
    for part in range(budgets + 2):
        budget = least + (most - least) * part // (budgets + 1)
        plan, seconds = planned(budget)
        first, last = plan.tries[0], plan.tries[-1]
        yield {
            "model": name,
            "budget": budget,
            "planned_bytes": plan.nbytes,
            "first_predicted": first.predicted,
            "first_compiled": first.compiled,
            "last_expected": last.expected,
            "last_compiled": last.compiled,
            "tries": len(plan.tries),
            "planning_seconds": round(seconds, 1),
        }


def main(config: Config) -> None:
    cases = dict(large_cases() if config.target else small_cases())
    for name, make in CASES.items() if config.models_path else ():
        cases[name] = lambda make=make: make(config.models_path, not config.target)  # type: ignore[misc]
    if unknown := set(config.models) - cases.keys():
        raise SystemExit(f"--models must be some of {', '.join(cases)}, got {', '.join(sorted(unknown))}")
    rows: list[dict[str, Any]] = []
    for name in config.models or cases:
        f, args = cases[name]()
        if config.target:
            place = functools.partial(_placed, sharding(config.target))
            args = jax.tree.map(place, args)
        for row in rows_of(name, (f, args), config.budgets):
            rows.append(row)
            print(json.dumps(row), flush=True)
        if config.save:
            record.save(f"plan_accuracy_{'gpu' if config.target else 'cpu'}", rows)


def _placed(sharding: Any, leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
