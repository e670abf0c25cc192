"""JAX's checkpoint policies against plans, on six unmodified public models: `python -m benchmarks.plan_public`.

`--models-path` is a folder with Flax's `examples` and Bonsai's `bonsai`, as for `benchmarks.public_models`. For each model and
each built-in policy of `jax.checkpoint` round the loss, the step is compiled, planned for exactly the temporary bytes that the
policy takes, and both are timed by turns. Models that are named by `--models` get a file of their own, whose rows the table
takes before those of all models. `--small` tries it on a CPU, ten minutes, and saves nothing.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import memjax
from benchmarks import record
from benchmarks.cases.plan_public import CASES, Case
from benchmarks.plan import by_turns


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    models_path: pathlib.Path = pathlib.Path("public")
    """A folder with Flax's `examples` and Bonsai's `bonsai`."""
    models: tuple[str, ...] = tuple(CASES)
    policies: tuple[str, ...] = ()
    """Some of the policies, by their names in the table; all where none is given."""
    runs: int = 8
    """Steps of which the median is taken."""
    workers: int = 1
    """Programs to compile at a time."""
    small: bool = False
    """Small models, on a CPU."""
    compile_only: bool = False
    """Compare bytes, with no step run."""


_BUILT_IN = jax.checkpoint_policies
POLICIES: dict[str, Any] = {
    "everything": None,
    "dots": _BUILT_IN.dots_saveable,
    "dots without batch": _BUILT_IN.dots_with_no_batch_dims_saveable,
    "nothing": _BUILT_IN.nothing_saveable,
}


def compiled(loss: Callable[..., Any], types: tuple[Any, ...]) -> tuple[Any, int]:
    """The step and its temporary bytes."""
    step = jax.jit(jax.value_and_grad(loss), compiler_options=dict(memjax.remat_compiler_options()))
    program = step.lower(*types).compile()
    memory: Any = program.memory_analysis()
    return program, memory.temp_size_in_bytes


def arrays(types: tuple[Any, ...]) -> tuple[Any, ...]:
    """Small random numbers; keys and integers are those of 0."""

    def one(aval: Any) -> Any:
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            return jnp.zeros(aval.shape, aval.dtype)
        return (0.02 * jax.random.normal(jax.random.key(0), aval.shape)).astype(aval.dtype)

    return jax.tree.map(one, types)


def rows_of(case: Case, config: Config) -> list[dict[str, Any]]:
    """One row for each policy."""

    def prepared(policy: Any) -> tuple[Any, int, dict[str, Any]]:
        loss = case.loss if policy is None else jax.checkpoint(case.loss, policy=policy)
        program, nbytes = compiled(loss, case.types)
        start = time.perf_counter()
        try:
            plan = memjax.plan(case.loss, *case.types, budget=nbytes)
        except ValueError as error:
            return program, nbytes, {"error": str(error)}
        seconds = time.perf_counter() - start
        planned, planned_bytes = compiled(memjax.planned(case.loss, plan=plan), case.types)
        found = {"program": planned, "planned_bytes": planned_bytes, "first_predicted_bytes": plan.first_nbytes}
        found["predicted_ratio"] = round(plan.seconds / plan.plain_seconds, 4)
        return program, nbytes, found | ({"planning_seconds": round(seconds, 1)} if config.workers == 1 else {})

    policies = {name: POLICIES[name] for name in config.policies or POLICIES}
    with ThreadPoolExecutor(config.workers) as pool:
        ready = list(pool.map(prepared, policies.values()))
    args = () if config.compile_only else arrays(case.types)
    rows = []
    for name, (program, nbytes, plan) in zip(policies, ready, strict=True):
        programs = [program, plan.pop("program")] if "program" in plan else [program]
        ms = [None] * 2 if config.compile_only else [*by_turns(programs, args, config.runs), None]
        rows.append({"policy": name, "bytes": nbytes, "ms": ms[0], "planned_ms": ms[1]} | plan)
    return rows


def name_of(models: tuple[str, ...]) -> str:
    """The file of results: some models alone leave the file of all as it is."""
    return "plan_public" if set(models) == CASES.keys() else "_".join(["plan_public", *models])


def main(config: Config) -> None:
    if unknown := set(config.models) - CASES.keys():
        raise SystemExit(f"--models must be some of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    if unknown := set(config.policies) - POLICIES.keys():
        raise SystemExit(f"--policies must be some of {', '.join(POLICIES)}, got {', '.join(sorted(unknown))}")
    if config.policies and set(config.models) == CASES.keys():
        raise SystemExit("--policies needs --models: the file of all models has all policies")
    rows: list[dict[str, Any]] = []
    for name in config.models:
        for row in rows_of(CASES[name](config.models_path, config.small), config):
            rows.append({"model": name} | row)
            print(json.dumps(rows[-1]), flush=True)
        if not config.small and not config.compile_only:
            record.save(name_of(config.models), rows)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
