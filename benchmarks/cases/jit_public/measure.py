"""Measures one public training step under `memjax.jit`: `python -m benchmarks.cases.jit_public.measure --case JSON`."""

import json
import pathlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import memjax
from benchmarks.cases.compiled_work import work
from benchmarks.cases.jit_public.loading import Step
from memjax._core.arguments import is_nnx
from memjax._jit.candidates import held_bytes

STEPS = 3


class Compiled:
    """Every program that is compiled ahead, in order."""

    def __init__(self) -> None:
        self.programs: list[Any] = []
        compiling = jax.stages.Lowered.compile

        def compile_and_keep(*args: Any, **kwargs: Any) -> Any:
            self.programs.append(compiling(*args, **kwargs))
            return self.programs[-1]

        jax.stages.Lowered.compile = compile_and_keep  # type: ignore[method-assign]


def copied(args: tuple) -> tuple:
    """The arguments again, so that what is donated stays; NNX objects that share variables do so in the copies."""
    leaves, tree = jax.tree.flatten(args, is_leaf=is_nnx)
    again = lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
    graph, state = nnx.split([leaf for leaf in leaves if is_nnx(leaf)])
    objects: Any = iter(nnx.merge(graph, jax.tree.map(again, state)))  # type: ignore[arg-type]
    return jax.tree.unflatten(tree, [next(objects) if is_nnx(leaf) else again(leaf) for leaf in leaves])


def changed(args: tuple, change: Callable[[Any], Any]) -> tuple:
    """The arguments with their arrays changed, those of NNX objects included."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Module | nnx.Optimizer | nnx.Metric):
            return jax.tree.map(change, leaf)
        nnx.update(leaf, jax.tree.map(change, nnx.state(leaf)))
        return leaf

    return jax.tree.map(of, copied(args), is_leaf=is_nnx)


def double(args: tuple) -> tuple:
    """The arguments with float64 where float32 was."""

    def one(leaf: Any) -> Any:
        wide = isinstance(leaf, jax.Array | np.ndarray) and leaf.dtype == jnp.float32
        return leaf.astype(jnp.float64) if wide else leaf

    return changed(args, one)


def rounded(args: tuple) -> tuple:
    """The arguments with every second float moved to the next one."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        array = jnp.asarray(leaf)
        every_second = (jnp.arange(array.size) % 2 == 0).reshape(array.shape)
        moved = jnp.where(every_second, jnp.nextafter(array, jnp.full_like(array, jnp.inf)), array)
        return moved if isinstance(leaf, jax.Array) else np.asarray(moved)

    return changed(args, one)


def plain_of(step: Step) -> Any:
    """The step without memjax."""
    objects = any(map(is_nnx, jax.tree.leaves(step.args, is_leaf=is_nnx)))
    return (nnx.jit if objects else jax.jit)(step.f, **step.options)


def values(tree: Any) -> list[np.ndarray]:
    """Arrays in results and arguments."""
    found = []
    for value in jax.tree.leaves(tree):
        if isinstance(value, jax.Array):
            keys = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            found.append(np.asarray(jax.random.key_data(value) if keys else value))
    return found


def trained(run: Callable[..., Any], step: Step) -> list[np.ndarray]:
    """The state after some steps, and what the last returned."""
    args = copied(step.args)
    for _ in range(STEPS):
        out = run(*args)
        args = step.again(out, args)
    return values((args, out))


def settled(step: Step) -> Step:
    """The step with the arguments of its second call: those of the first may share variables, or have Python's numbers."""
    args = copied(step.args)
    return step._replace(args=step.again(plain_of(step)(*args), args))


def error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference in any array, relative to its largest value; what is smaller than 1e-3 counts as 1e-3."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"{a.dtype}{a.shape} where plain JAX has {b.dtype}{b.shape}")
        a, b = a.astype(np.float64), b.astype(np.float64)
        if not np.isfinite(b).all():
            raise ValueError("plain JAX has results that are not finite")
        worst = max(worst, float(np.max(np.abs(a - b), initial=0) / np.max(np.abs(b), initial=1e-3)))
    return worst


def flops(program: Any) -> float:
    """FLOPs of products, loops by their number of turns; where that is not known XLA's, which counts a turn once."""
    try:
        return work(program.as_text()).flops
    except AssertionError:
        found = program.cost_analysis()
        return float((found[0] if isinstance(found, list) else found).get("flops", 0.0))


def planned(step: Step, budget: Any, compiled: Compiled) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The step under `memjax.jit`, its plan, its program, and how long it took."""
    compiled.programs.clear()
    start = time.perf_counter()
    jitted = memjax.jit(step.f, budget=budget, **step.options)
    plan = jitted.plan(*step.args)
    seconds = time.perf_counter() - start
    program = next(one for one in reversed(compiled.programs) if held_bytes(one) == plan.nbytes)
    return jitted, plan, program, {"seconds": round(seconds, 2), "compilations": len(compiled.programs)}


def row_of(step: Step, budget: Any, plain: dict[str, Any], compiled: Compiled) -> dict[str, Any]:
    jitted, plan, program, row = planned(step, budget, compiled)
    row |= {"budget": plan.budget, "compiled": held_bytes(program), "predicted": plan.predicted_nbytes}
    row["kept_budget"] = row["compiled"] <= plan.budget
    row["tiles"], row["microbatches"] = len(plan.tiled), plan.microbatches
    row["passes"] = len(plan.passes)
    row["replanned"] = sum(part is not None and bool(part.stretches) for part in plan.passes)
    row["in_steps"] = any(part.in_steps for part in plan.passes if part is not None)
    row["flops_ratio"] = round(flops(program) / plain["flops"], 4) if plain["flops"] else None
    row["predicted_time"] = round(plan.seconds / plan.plain_seconds, 4) if plan.plain_seconds else 1.0
    row["error"] = error(trained(jitted, step), plain["state"])
    return row


def measure(step: Step, shares: list[float], in_double: bool) -> dict[str, Any]:
    """Rows of one step."""
    compiled = Compiled()
    _, plan, program, spare = planned(step, "1TiB", compiled)
    found = program.memory_analysis()
    temporaries = found.temp_size_in_bytes
    run = plain_of(step)
    result: dict[str, Any] = {"plain": plan.nbytes, "temporaries": temporaries}
    spare_jit, _, spare_program, spare = planned(step, 2 * plan.nbytes, compiled)
    if not any(map(is_nnx, jax.tree.leaves(step.args, is_leaf=is_nnx))):
        spare["same_program"] = run.lower(*step.args).compile().as_text() == spare_program.as_text()
    plain: dict[str, Any] = {"flops": flops(program), "state": trained(run, step)}
    result["rounding"] = error(trained(run, step._replace(args=rounded(step.args))), plain["state"])
    spare["error"] = error(trained(spare_jit, step), plain["state"])
    result["spare"] = spare
    result["rows"] = []
    for share in shares:
        budget = plan.nbytes - int((1 - share) * temporaries)
        row: dict[str, Any] = {"share": share, "asked": budget}
        try:
            row |= row_of(step, budget, plain, compiled)
        except ValueError as refusal:
            row["refused"], row["compilations"] = str(refusal)[:600], len(compiled.programs)
            least = memjax.jit(step.f, budget="min", **step.options).plan(*step.args).nbytes
            try:
                row["least"] = row_of(step, least, plain, compiled)
                row["least"]["share"] = round(1 - (plan.nbytes - least) / temporaries, 3)
            except ValueError as again:
                row["least"] = {"asked": least, "refused": str(again)[:600]}
        result["rows"].append(row)
    if in_double:
        result["double"] = _in_double(step, min(shares), compiled)
    return result


def _in_double(step: Step, share: float, compiled: Compiled) -> dict[str, Any]:
    with jax.enable_x64(True):
        wide = step._replace(args=double(step.args))
        try:
            _, plan, program, _ = planned(wide, "1TiB", compiled)
            run = plain_of(wide)
            state = trained(run, wide)
            rounding = error(trained(run, wide._replace(args=rounded(wide.args))), state)
        except (TypeError, ValueError, AssertionError) as no:
            return {"skipped": f"{type(no).__name__}: {no}"[:200]}
        plain = {"flops": flops(program), "state": state}
        budget = plan.nbytes - int((1 - share) * program.memory_analysis().temp_size_in_bytes)
        for asked in (budget, "min"):
            try:
                return {"share": share, "rounding": rounding} | row_of(wide, asked, plain, compiled)
            except ValueError:
                continue
    return {"refused": True}


def main(case: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.cases.jit_public import CASES

    step = CASES[case["name"]](pathlib.Path(case["public"]))
    return measure(settled(step), case["shares"], case["double"])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    given = json.loads(sys.argv[sys.argv.index("--case") + 1])
    try:
        print(json.dumps(main(given)))
    except Exception as wrong:
        traceback.print_exc()
        raise SystemExit(f"{type(wrong).__name__}: {str(wrong)[:250]}") from None
