"""Time and memory of one gradient of an LSTM over a long sequence, within memory budgets, beside other ways.

    python -m benchmarks.bptt             # 1,000 steps, LSTM 256, batch 64, float32: a GPU, about 3 minutes
    python -m benchmarks.bptt --length 100 --batch 4 --hidden 32 --runs 2       # a quick look on a CPU

Prints a table and writes JSON. "temp" is what XLA allocates beyond inputs and outputs; gradients are compared
with `jax.lax.scan`'s. The last part runs several plans, to see what loops and branches cost.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax import lax
from rich.console import Console
from rich.table import Table

from memjax import remat
from memjax.remat import _scan as scan_module
from memjax.remat._plan import Plan


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run."""

    length: int = 1000
    batch: int = 64
    hidden: int = 256
    runs: int = 7
    budgets: tuple[str, ...] = ("35.5MiB", "24.5MiB", "14.4MiB", "6.4MiB", "2.0MiB")
    slots: tuple[int, ...] = (10, 30, 50)
    equinox: tuple[int, ...] = (100, 50, 10)
    plans: bool = True
    out: pathlib.Path = pathlib.Path("benchmarks/results/bptt.json")


def cell(params: dict[str, Any], carry: Any, x: Any) -> tuple[Any, None]:
    h, s = carry
    z = x @ params["wi"] + h @ params["wh"] + params["b"]
    i, f, g, o = jnp.split(z, 4, -1)
    s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(s), s), None


def loss_with(scan: Callable[..., Any], params: Any, xs: Any) -> Any:
    """Run the cell with `scan(f, init, xs)` and return a scalar."""
    start = jnp.zeros((xs.shape[1], params["wh"].shape[0]))
    (h, _), _ = scan(functools.partial(cell, params), (start, start), xs)
    return (h**2).sum()


def segments(*sizes: int) -> Callable[..., Any]:
    """Checkpointed scans in each other, by hand: `sizes` from the innermost on; xs sliced in place."""

    def scan(f, init, xs):
        def innermost(carry, first):
            return lax.scan(f, carry, lax.dynamic_slice_in_dim(xs, first, sizes[0], 0))[0]

        run, total = innermost, sizes[0]
        for size in (*sizes[1:], len(xs) // math.prod(sizes)):
            run, total = repeat(run, size, total), total * size
        return run(init, 0), None

    def repeat(run, size, steps):
        """`size` checkpointed runs of `steps` steps."""

        def body(first, carry, i):
            return jax.checkpoint(run)(carry, first + i * steps), None

        return lambda carry, first: lax.scan(functools.partial(body, first), carry, jnp.arange(size))[0]

    return scan


def cases(options: Options) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(group, name, scan)."""
    length = options.length
    yield "plain", "jax.lax.scan", lax.scan
    for budget in options.budgets:
        yield "memjax", f"budget {budget}", functools.partial(remat.scan, budget=budget)
    for slots in options.slots:
        yield (
            "memjax slots",
            f"hidden, {slots} slots",
            functools.partial(remat.scan, slots=slots, strategy="hidden"),
        )
    for sizes in ((10,), (20,), (25,), (40,), (100,), (10, 10), (10, 5), (5, 10), (5, 5, 5)):
        if length % math.prod(sizes) == 0:
            yield "nest", "segments of " + " x ".join(map(str, sizes)), segments(*sizes)
    try:
        import equinox.internal as eqxi
    except ImportError:
        return
    for slots in options.equinox:
        yield (
            "equinox",
            f"{slots} checkpoints",
            functools.partial(eqxi.scan, kind="checkpointed", checkpoints=slots),
        )


def plans(options: Options) -> Iterator[tuple[str, Plan]]:
    """Different plans of much the same memory, where 1,000 steps are to run."""
    for block in (4, 5, 8, 10, 20):
        for slots in (12, 24, 48):
            tail = (options.length - 1) % block + 1
            parts = (options.length - tail) // block + 1
            table = remat.schedule(parts, min(slots, parts), strategy="hidden")
            yield f"table, blocks of {block}, {slots} slots", Plan(options.length, block, tail, table)
    for levels, block in (((10, 10), 10), ((14, 14), 5), ((8, 8), 4), ((8, 5, 5), 5)):
        tail = options.length - block * math.prod(levels)
        if tail > 0 or block * math.prod(levels) == options.length:
            yield f"nest {levels} of {block}", Plan(options.length, block, tail, levels=levels)


def measure(scan: Callable[..., Any], params: Any, xs: Any, runs: int) -> tuple[dict[str, float], Any]:
    """Milliseconds, temp bytes and compile seconds of one gradient, and the gradient."""
    start = time.perf_counter()
    compiled = jax.jit(jax.value_and_grad(functools.partial(loss_with, scan))).lower(params, xs).compile()
    compile_s = time.perf_counter() - start
    _, gradient = jax.block_until_ready(compiled(params, xs))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, xs))
        times.append(time.perf_counter() - start)
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "ms": statistics.median(times) * 1e3,
        "temp": memory.temp_size_in_bytes,
        "compile_s": compile_s,
    }, gradient


def main(options: Options) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = options.hidden
    params = {
        "wi": jax.random.normal(keys[0], (hidden, 4 * hidden)) * 0.05,
        "wh": jax.random.normal(keys[1], (hidden, 4 * hidden)) * 0.05,
        "b": jnp.zeros(4 * hidden),
    }
    xs = jax.random.normal(keys[2], (options.length, options.batch, hidden))
    start = jnp.zeros((options.batch, hidden))
    costs = remat.profile(functools.partial(cell, params), (start, start), xs)
    console = Console(width=150)
    console.print(jax.devices()[0].device_kind, "jax", jax.__version__, costs)

    rows: list[dict[str, Any]] = []
    reference: Any = None

    def record(group: str, name: str, scan: Callable[..., Any], **more: Any) -> None:
        nonlocal reference
        try:
            row, gradient = measure(scan, params, xs, options.runs)
        except Exception as error:  # one failing peer must not lose the others' results
            console.print(f"{group}: {name} failed: {str(error)[:300]}")
            return
        reference = gradient if reference is None else reference
        off = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), gradient, reference)
        plain = rows[0]["ms"] if rows else row["ms"]
        rows.append(
            {
                "group": group,
                "name": name,
                **row,
                "ratio": row["ms"] / plain,
                "off": max(off.values()),
                **more,
            }
        )
        console.print(
            f"{group:13s} {name:36s} {row['ms']:8.1f} ms x{row['ms'] / plain:5.2f} "
            f"{row['temp'] / 2**20:8.2f} MiB compile {row['compile_s']:4.1f} s "
            f"off {max(off.values()):.0e} {more or ''}"
        )

    chosen: list[Plan] = []
    choose = scan_module.choose

    def note(*arguments: Any) -> Plan:
        chosen.append(choose(*arguments))
        return chosen[-1]

    scan_module.choose = note  # type: ignore[assignment]
    for group, name, scan in cases(options):
        if group == "memjax":
            for label, variant in ((name, scan), (f"{name}, profiled", functools.partial(scan, costs=costs))):
                jax.eval_shape(functools.partial(loss_with, variant), params, xs)
                plan = chosen[-1]
                record(group, label, variant, plan=describe(plan), forward_steps=plan.forward_steps)
        else:
            record(group, name, scan)
    if options.plans:
        for name, plan in plans(options):
            scan_module.choose = lambda *_, plan=plan: plan
            predicted = (plan.forward_steps * costs.forward + plan.length * costs.backward) * 1e3
            record(
                "plan",
                name,
                functools.partial(remat.scan, budget=0),
                forward_steps=plan.forward_steps,
                floor_ms=predicted,
            )
    scan_module.choose = choose

    table = Table("", "", "ms", "against lax.scan", "temp MiB", "plan")
    for row in rows:
        temp = f"{row['temp'] / 2**20:.1f}"
        table.add_row(row["group"], row["name"], f"{row['ms']:.1f}", f"{row['ratio']:.2f}", temp, row.get("plan", ""))
    console.print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    options.out.write_text(
        json.dumps({**machine, "costs": dataclasses.asdict(costs), "options": str(options), "rows": rows}, indent=1)
        + "\n"
    )


def describe(plan: Plan) -> str:
    """A plan in a few words."""
    if plan.schedule is not None:
        parts = plan.schedule
        return f"table of {parts.length} blocks of {plan.block}, {parts.slots} slots, tail {plan.tail}"
    return f"nest {plan.levels} of {plan.block}, tail {plan.tail}"


if __name__ == "__main__":
    main(tyro.cli(Options))
