"""Time and memory of one gradient of an LSTM over a long sequence, within memory budgets, beside other ways.

    python -m benchmarks.bptt                       # 1,000 steps, LSTM 256, batch 64, float32: a GPU, some 3 minutes
    python -m benchmarks.bptt --name bptt_cpu       # the same on a CPU, some 10 minutes
    python -m benchmarks.bptt --length 100 --batch 4 --hidden 32 --lengths 20 40 --name scratch    # a quick look

Writes `results/NAME.json`; `python -m benchmarks.bptt_figures` draws it. All cases run in turn, round after round, so
that a busy machine is the same to all: times are medians, ratios medians of each round's ratios. "temp" is what XLA
allocates beyond inputs and outputs. Gradients are compared with `jax.lax.scan`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import linen as nn
from jax import lax
from rich.console import Console
from rich.progress import track

import memjax
from benchmarks import record
from memjax import remat

Scan = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run."""

    cell: Literal["lstm", "gru"] = "lstm"
    length: int = 1000
    batch: int = 64
    hidden: int = 256
    rounds: int = 7
    budgets: tuple[str, ...] = ("35.4MiB", "24.7MiB", "14.5MiB", "6.4MiB", "2.15MiB")
    slots: tuple[int, ...] = (10, 30, 50)
    """Slots of `remat.scan`, and checkpoints of equinox's scan, which also takes 100."""
    lengths: tuple[int, ...] = (100, 200, 400, 700, 1000)
    """Lengths in the curves over the length."""
    long: int = 100_000
    """Steps of one long sequence: its program is compared with that for `length` steps, and run on a GPU."""
    curves: bool = True
    """Whether to draw the curves over the length, too."""
    name: str = "bptt"


def cell(params: dict[str, Any], carry: Any, x: Any) -> tuple[Any, None]:
    """One step of an LSTM: x of shape (batch, inputs), a carry of two (batch, hidden)."""
    h, s = carry
    z = x @ params["wi"] + h @ params["wh"] + params["b"]
    i, f, g, o = jnp.split(z, 4, -1)
    s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(s), s), None


def gru(params: dict[str, Any], carry: Any, x: Any) -> tuple[Any, None]:
    """One step of a GRU: x of shape (batch, inputs), a carry of one (batch, hidden)."""
    (h,) = carry
    of_x, of_h = (jnp.split(z, 3, -1) for z in (x @ params["wi"] + params["b"], h @ params["wh"]))
    r, z = (jax.nn.sigmoid(of_x[i] + of_h[i]) for i in range(2))
    return ((1 - z) * jnp.tanh(of_x[2] + r * of_h[2]) + z * h,), None


GATES = {"lstm": 4, "gru": 3}


def step_of(params: dict[str, Any]) -> tuple[Callable[..., Any], int]:
    """The cell of these parameters, and how many arrays it carries."""
    hidden, gates = params["wh"].shape
    return (functools.partial(gru, params), 1) if gates == 3 * hidden else (functools.partial(cell, params), 2)


def loss_with(scan: Scan, params: Any, xs: Any) -> Any:
    """Run the cell with `scan(f, init, xs)` and return a scalar."""
    step, count = step_of(params)
    (h, *_), _ = scan(step, (jnp.zeros((xs.shape[1], params["wh"].shape[0])),) * count, xs)
    return (h**2).sum()


def segments(*sizes: int) -> Scan:
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


def two_level(size: int) -> Scan:
    """The usual checkpointed scan of scans, xs reshaped into segments."""

    def scan(f, init, xs):
        xs = xs.reshape(-1, size, *xs.shape[1:])
        return lax.scan(jax.checkpoint(lambda carry, x: lax.scan(f, carry, x)), init, xs)

    return scan


def flax_loss(params: Any, xs: Any) -> Any:
    """The same loss with `nn.scan` over `nn.remat`."""

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            own_params = {k: self.param(k, nn.initializers.zeros, v.shape) for k, v in params.items()}
            return step_of(own_params)[0](carry, x)

    start = (jnp.zeros((xs.shape[1], params["wh"].shape[0])),) * step_of(params)[1]
    run = nn.scan(nn.remat(Cell), variable_broadcast="params", split_rngs={"params": False})()
    (h, *_), _ = run.apply({"params": params}, start, xs)
    return (h**2).sum()


def cases(options: Options) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(group, name, loss of params and xs)."""

    def with_scan(scan: Scan, **more: Any) -> Callable[..., Any]:
        return functools.partial(loss_with, functools.partial(scan, **more))

    yield "plain", "jax.lax.scan", with_scan(lax.scan)
    yield "plain", "jax.lax.scan, unroll=5", with_scan(lax.scan, unroll=5)
    for budget in options.budgets:
        yield "memjax", f"budget {budget}", with_scan(remat.scan, budget=budget)
    for budget in options.budgets:
        yield "planned", f"planned, budget {budget}", memjax.planned(with_scan(lax.scan), budget=budget)
    for slots in options.slots:
        yield "memjax", f"hidden, {slots} slots", with_scan(remat.scan, slots=slots, strategy="hidden")
        yield "memjax", f"mixed, {slots} slots", with_scan(remat.scan, slots=slots)
    for sizes in ((20,), (40,), (10, 10), (5, 10), (5, 5, 5)):
        if options.length % math.prod(sizes) == 0:
            yield "nest", "segments of " + " x ".join(map(str, sizes)), with_scan(segments(*sizes))
    if options.length % 25 == 0:
        yield "two-level", "segments of 25", with_scan(two_level(25))
    yield "flax", "nn.scan of nn.remat", flax_loss
    try:
        import equinox.internal as eqxi
    except ImportError:
        return
    for slots in (*options.slots, 100):
        yield "equinox", f"{slots} checkpoints", with_scan(eqxi.scan, kind="checkpointed", checkpoints=slots)


def curves(options: Options, alpha: int) -> Iterator[tuple[str, str, int, Scan]]:
    """(group, name, length, scan) of the paper's figures 2, 6 and 7; an internal state takes as much memory as `alpha` carries.

    "budget" is the plan that `remat.scan` chooses for the same number of bytes.
    """
    unit = 2 * options.batch * options.hidden * 4  # bytes of a carry
    for length in options.lengths:
        yield "figure 2", "plain", length, lax.scan
        for slots in (10, 50, 100, 500, 1000):
            yield "figure 2", str(slots), length, functools.partial(remat.scan, slots=slots, strategy="hidden")
        for units in (10, 20):
            for strategy in ("hidden", "internal", "mixed"):
                slots = units if strategy == "internal" else units * alpha
                scan = functools.partial(remat.scan, slots=slots, strategy=strategy)
                yield "figure 6", f"{units} {strategy}", length, scan
            budget = functools.partial(remat.scan, budget=units * alpha * unit)
            yield "figure 6", f"{units} budget", length, budget
        root = math.isqrt(length)
        yield "figure 7", "mixed", length, functools.partial(remat.scan, slots=root * alpha)
        yield "figure 7", "budget", length, functools.partial(remat.scan, budget=root * alpha * unit)
        if length % root == 0:
            yield "figure 7", "square root", length, segments(root)


class Case:
    """One compiled gradient, and the times that it took."""

    def __init__(self, row: dict[str, Any], loss: Callable[..., Any], params: Any, xs: Any):
        start = time.perf_counter()
        self.program = jax.jit(jax.value_and_grad(loss)).lower(params, xs).compile()
        memory = self.program.memory_analysis()
        assert memory is not None
        self.row = {**row, "temp": memory.temp_size_in_bytes, "compile_s": time.perf_counter() - start}
        self.arguments = params, xs
        self.times: list[float] = []

    def run(self) -> Any:
        start = time.perf_counter()
        _, gradient = jax.block_until_ready(self.program(*self.arguments))
        self.times.append(time.perf_counter() - start)
        return gradient


def build(todo: list[tuple[str, str, int, Callable[..., Any]]], params: Any, xs: Any) -> list[Case]:
    """Compile every (group, name, length, loss). One failing peer must not lose the others' results."""
    compiled = []
    for group, name, length, loss in track(todo, "Compiling"):
        try:
            compiled.append(Case({"group": group, "name": name, "length": length}, loss, params, xs[:length]))
        except Exception as error:
            Console().print(f"{group}, {name}, {length} steps: failed: {str(error)[:300]}")
    return compiled


def measure(compiled: list[Case], rounds: int, console: Console) -> list[dict[str, Any]]:
    """Time the cases in turn; ratios are to the first."""
    for case in compiled:
        case.run()
        case.times.clear()
    for _ in track(range(rounds), "Timing"):
        for case in compiled:
            case.run()
    for case in compiled:
        ratios = [seconds / plain for seconds, plain in zip(case.times, compiled[0].times, strict=True)]
        case.row |= {"ms": statistics.median(case.times) * 1e3, "ratio": statistics.median(ratios)}
        console.print(
            "{group:10s} {name:32s} {length:6d} {ms:9.2f} ms x{ratio:7.3f}".format(**case.row),
            f"{case.row['temp'] / 2**20:8.2f} MiB, compiled in {case.row['compile_s']:.1f} s",
        )
    return [case.row for case in compiled]


def long_sequences(options: Options, params: Any, console: Console) -> list[dict[str, Any]]:
    """Size, memory and compile time of the program for short and long sequences, within one budget."""
    loss = functools.partial(loss_with, functools.partial(remat.scan, budget="56MiB"))
    rows = []
    for length in (options.length, options.long):
        xs = jax.ShapeDtypeStruct((length, options.batch, options.hidden), jnp.float32)
        lowered = jax.jit(jax.value_and_grad(loss)).lower(params, xs)
        start = time.perf_counter()
        program = lowered.compile()
        row = {"group": "long", "length": length, "compile_s": time.perf_counter() - start}
        memory = program.memory_analysis()
        assert memory is not None
        row |= {"temp": memory.temp_size_in_bytes, "characters": len(program.as_text() or "")}
        if jax.default_backend() == "gpu":
            values = jax.random.normal(jax.random.key(1), xs.shape)
            for _ in range(2):
                start = time.perf_counter()
                jax.block_until_ready(program(params, values))
                row["ms"] = (time.perf_counter() - start) * 1e3
        console.print(row)
        rows.append(row)
    return rows


def main(options: Options) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, gates = options.hidden, GATES[options.cell]
    params = {
        "wi": jax.random.normal(keys[0], (hidden, gates * hidden)) * 0.05,
        "wh": jax.random.normal(keys[1], (hidden, gates * hidden)) * 0.05,
        "b": jnp.zeros(gates * hidden),
    }
    xs = jax.random.normal(keys[2], (max(options.length, *options.lengths), options.batch, hidden))
    step, count = step_of(params)
    start = (jnp.zeros((options.batch, hidden)),) * count
    console = Console(width=150)
    costs = [remat.profile(step, start, xs) for _ in range(2)]  # do they repeat?
    rows = [{"group": "profile", "run": i, **dataclasses.asdict(cost)} for i, cost in enumerate(costs)]
    console.print(*costs)

    todo = [(group, name, options.length, loss) for group, name, loss in cases(options)]
    for budget in options.budgets:
        scan = functools.partial(remat.scan, budget=budget, costs=costs[0])
        todo.append(("memjax", f"budget {budget}, profiled", options.length, functools.partial(loss_with, scan)))
    compiled = build(todo, params, xs)
    reference = compiled[0].run()
    for case in compiled:
        off = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), case.run(), reference)
        case.row["off"] = max(off.values())
    rows += measure(compiled, options.rounds, console)
    rows += long_sequences(options, params, console)
    record.save(options.name, rows)
    if not options.curves:
        return

    todo = [
        (group, name, length, functools.partial(loss_with, scan))
        for group, name, length, scan in curves(options, alpha=4)
    ]
    points = measure(build(todo, params, xs), max(1, options.rounds // 3), console)
    for row in points:
        del row["ratio"]  # the lengths differ
    record.save(options.name, rows + points)


if __name__ == "__main__":
    main(tyro.cli(Options))
