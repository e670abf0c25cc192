"""`memjax.jit` on meshes of eight simulated CPU devices beside policies by hand: `python -m benchmarks.jit_mesh_cpu`, about
an hour on two cores.

For each way to write a step (`benchmarks/cases/jit_mesh_cpu.py`) the step as it is, with `jax.checkpoint` round each layer,
and by `memjax.jit` within the bytes that each policy by hand takes, and 70% of the temporaries of the step as it is. Bytes,
FLOPs and bytes sent are those of a device. Predicted are the bytes of the whole step, corrected by what was compiled before;
`model_to_compiled` is the model alone, of the derivatives. `--modes scan --meshes fsdp --updates adamw` runs one of them.
"""

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
import rich.console
import rich.table
import tyro

import memjax
from benchmarks import record
from benchmarks.cases.compiled_work import work
from benchmarks.cases.jit_mesh_cpu import MESHES, MODES, UPDATES, Step, step
from memjax._jit.candidates import held_bytes

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "products without batches": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "products": jax.checkpoint_policies.dots_saveable,
}
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
_MOST = 1.02  # of the work of the best policy by hand that fits
_SHARE = 0.7  # of the temporaries of the step as it is


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    modes: tuple[str, ...] = MODES
    meshes: tuple[str, ...] = MESHES
    updates: tuple[str, ...] = UPDATES
    jobs: int = 1
    """How many steps are measured at once. One takes about two cores."""
    name: str = "jit_mesh_cpu"
    """Name of the file of results."""


def main(config: Config) -> None:
    every = [(mode, where, update) for where in config.meshes for mode in config.modes for update in config.updates]
    cases = [{"mode": mode, "mesh": where, "update": update} for mode, where, update in every]
    environ = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    results: dict[str, list[dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    for case, found in record.in_fresh_processes("benchmarks.jit_mesh_cpu", cases, environ, jobs=config.jobs):
        results[str(case)] = [{**case, **row} for row in found["rows"]] if "rows" in found else [found]
        print(json.dumps(found), flush=True)
        rows = [row for one in cases for row in results.get(str(one), ())]
        record.save(config.name, rows, on_cpu=True)
    show(rows)


def run(case: dict[str, str]) -> dict[str, Any]:
    """A row for each budget of a step."""
    with contextlib.ExitStack() as stack:
        plain = step(case["mode"], case["mesh"], case["update"])
        if plain.mesh is not None:
            stack.enter_context(jax.set_mesh(plain.mesh))
        return {"rows": _rows(case, plain)}


def _rows(case: dict[str, str], plain: Step) -> list[dict[str, Any]]:
    compiled = _compiled(plain)
    as_written = _counted(compiled)
    expected = _after_three(compiled, plain.args)
    by_hand: dict[str, dict[str, float]] = {"as it is": as_written}
    for name, policy in POLICIES.items():
        wrap = lambda layer, policy=policy: jax.checkpoint(layer, policy=policy)
        by_hand[name] = _counted(_compiled(step(case["mode"], case["mesh"], case["update"], wrap)))
    budgets = {name: int(one["held"]) for name, one in by_hand.items() if name != "as it is"}
    budgets["70%"] = int(as_written["held"] - (1 - _SHARE) * as_written["temporary"])
    rows = []
    for name, budget in budgets.items():
        fitting = [one for one in by_hand.values() if one["held"] <= budget]
        row: dict[str, Any] = {"budget": name, "nbytes": budget, "by_hand": by_hand.get(name), "as_it_is": as_written}
        best = min(fitting, key=lambda one: (one["flops"], one["sent"]), default=None)
        row |= _planned(plain, budget, expected)
        if "held" in row and best is not None:
            row["flops_to_best"] = round(row["flops"] / best["flops"], 4)
            row["sent_to_best"] = round(row["sent"] / best["sent"], 4)
        row["missed"] = _missed(row, fits_by_hand=best is not None)
        rows.append(row)
    return rows


def _compiled(one: Step) -> Any:
    options: Any = memjax.remat_compiler_options()
    return jax.jit(one.f, **one.options).lower(*one.args).compile(options)


def _counted(compiled: Any) -> dict[str, float]:
    found, done = compiled.memory_analysis(), work(compiled.as_text())
    return {
        "held": held_bytes(compiled),
        "temporary": found.temp_size_in_bytes,
        "flops": done.flops,
        "sent": done.sent,
    }


def _planned(plain: Step, budget: int, expected: Any) -> dict[str, Any]:
    """What `memjax.jit` does within the budget."""
    counted: list[int] = []
    compiling = jax.stages.Lowered.compile

    def compile(*args: Any, **kwargs: Any) -> Any:
        counted.append(1)
        return compiling(*args, **kwargs)

    jitted = memjax.jit(plain.f, budget=budget, allow=("recompute",), **plain.options)
    begun = time.perf_counter()
    jax.stages.Lowered.compile = compile  # type: ignore[method-assign]
    try:
        plan = jitted.plan(*plain.args)
    except ValueError as error:
        return {"error": str(error).split(":\n")[0], "compilations": len(counted)}
    finally:
        jax.stages.Lowered.compile = compiling  # type: ignore[method-assign]
    seconds = time.perf_counter() - begun
    compiled = jitted.lower(*plain.args).compile(memjax.remat_compiler_options())
    differences = jax.tree.map(_difference, _after_three(jitted, plain.args), expected)
    parts = [part for part in plan.passes if part]
    return {
        **_counted(compiled),
        "planned": plan.nbytes,
        "plan_seconds": round(seconds, 1),
        "compilations": len(counted),
        "predicted_to_compiled": round(plan.predicted_nbytes / plan.nbytes, 4),
        "model_to_compiled": [round(part.first_nbytes / max(part.nbytes, 1), 3) for part in parts],
        "predicted_time": round(plan.seconds / plan.plain_seconds, 4) if plan.plain_seconds else 1.0,
        "in_steps": [part.in_steps for part in parts],
        "difference": max(jax.tree.leaves(differences)),
    }


def _after_three(f: Any, args: tuple[Any, ...]) -> Any:
    """Parameters and loss after three steps."""
    params, state, tokens = args
    params, state = jax.tree.map(lambda a: jax.device_put(np.asarray(a), a.sharding), (params, state))
    for _ in range(3):
        params, state, value = f(params, state, tokens)
    return jax.tree.map(np.asarray, (params, value))


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest, to the largest value."""
    return float(np.max(np.abs(found - expected)) / max(float(np.max(np.abs(expected))), 1e-6))


def _missed(row: dict[str, Any], *, fits_by_hand: bool) -> list[str]:
    """Which of the promises and bars are missed."""
    if "error" in row:
        return ["refused"] if fits_by_hand else []
    found = {
        "bytes": max(row["held"], row["planned"]) > row["nbytes"],
        "results": row["difference"] > 1e-5,
        "FLOPs": row.get("flops_to_best", 1.0) > _MOST,
        "sent": row.get("sent_to_best", 1.0) > _MOST,
    }
    return [name for name, is_so in found.items() if is_so]


def show(rows: list[dict[str, Any]]) -> None:
    heads = "layers", "mesh", "update", "budget of", "KiB", "to as it is", "holds", "FLOPs", "sent", "differs"
    table = rich.table.Table(*heads, "predicted", "compiled", "missed", title="memjax.jit on eight devices")
    for row in rows:
        cells = [row["mode"], row["mesh"], row["update"]]
        if "budget" not in row:
            table.add_row(*cells, row["error"][:60])
            continue
        cells += [row["budget"], f"{row['nbytes'] / 2**10:.0f}", f"{row['nbytes'] / row['as_it_is']['held']:.2f}"]
        if "held" in row:
            cells += [
                f"{row['held'] / row['nbytes']:.3f}",
                *(str(row.get(f"{k}_to_best", "")) for k in ("flops", "sent")),
            ]
            cells += [f"{row['difference']:.0e}", str(row["predicted_to_compiled"])]
        else:
            cells += ["refused", "", "", "", ""]
        table.add_row(*cells, str(row["compilations"]), ", ".join(row["missed"]))
    console = rich.console.Console(width=170)
    console.print(table)
    off = [abs(row["predicted_to_compiled"] - 1) for row in rows if "held" in row]
    if off:
        console.print(f"predicted bytes are off by {statistics.median(off):.1%} in the median, {max(off):.1%} at worst")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(run(json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Config, description=__doc__))
