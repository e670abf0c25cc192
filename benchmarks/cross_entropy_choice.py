"""Every implementation of `linear_cross_entropy` on many shapes: `python -m benchmarks.cross_entropy_choice`, on one GPU.

It measures milliseconds of forward and backward pass and compiled bytes of temporaries, with gradients of x and w, or of x
alone as with a frozen head. `memjax/_linear_cross_entropy/choice.py` is fitted to the results. The implementations of a shape
take turns, several times, so that a GPU that slows down slows all of them; times are medians of the turns. Results are saved
after every shape. It takes about five minutes on an H200, most of them compiling. `--smoke` tries it anywhere, with tiny shapes.
`--fit` measures nothing: it prints the costs for `choice.py` that fit the saved results best, and how near each prediction is.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tyro

import memjax
from benchmarks import record
from memjax._linear_cross_entropy import choice
from memjax._linear_cross_entropy.options import Operands, Options

IMPLEMENTATIONS = (
    *("forward_grad/triton", "forward_grad/jnp"),
    *("recompute/mosaic", "recompute/triton", "recompute/jnp"),
    "full",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    tokens: int
    dim: int
    vocabulary: int
    dtype: str = "bfloat16"
    wanted: str = "xw"
    """Arrays that are differentiated: "xw", or "x" for a frozen head."""


SHAPES = (
    Shape(4096, 1024, 50257),
    Shape(16384, 4096, 128256),
    Shape(8192, 2304, 256128),
    Shape(8192, 768, 50257),
    Shape(8192, 4096, 32000),
    Shape(1024, 512, 8192),
    Shape(2048, 8192, 128256),
    Shape(8192, 1024, 32768, "float32"),
    Shape(4096, 1024, 50257, wanted="x"),
    Shape(32768, 2048, 49152),
    Shape(4096, 2048, 151936),
    Shape(16384, 1024, 50304),
    Shape(32768, 512, 8192),
    Shape(1024, 4096, 128256),
    Shape(8192, 1024, 50304, wanted="x"),
    Shape(4096, 2048, 50257, "float32"),
    Shape(32768, 768, 50257),
    Shape(4096, 512, 256000),
    Shape(8192, 4096, 128256, wanted="x"),
    Shape(2048, 2048, 32000),
)
SMOKE = (Shape(64, 32, 129), Shape(96, 16, 256, "float32"), Shape(64, 32, 256, wanted="x"))


@dataclasses.dataclass(frozen=True)
class Config:
    turns: int = 7
    """How often each implementation is timed, after one call that is not counted."""
    turn_ms: float = 30.0
    """A turn's least time: as many calls in a row."""
    full_gib: float = 48.0
    """Leave "full" out where three float32 arrays of logits would take more."""
    time_limit: float = 560.0
    """Start no shape after this many seconds."""
    smoke: bool = False
    fit: bool = False
    name: str = "cross_entropy_choice"


def inputs(shape: Shape) -> tuple[Any, Any, Any]:
    """(x, w, labels), with logits of standard deviation one."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (shape.tokens, shape.dim), shape.dtype)
    # Scaled where it is made: two heads would not fit beside all logits.
    w = jax.jit(lambda key: jax.random.normal(key, (shape.vocabulary, shape.dim), shape.dtype) / shape.dim**0.5)(
        keys[1]
    )
    return x, w, jax.random.randint(keys[2], (shape.tokens,), 0, shape.vocabulary)


def compiled(shape: Shape, implementation: str, arrays: tuple[Any, ...]) -> Any:
    loss = functools.partial(memjax.linear_cross_entropy, implementation=implementation)
    argnums = (0, 1) if shape.wanted == "xw" else 0
    return jax.jit(jax.value_and_grad(loss, argnums=argnums)).lower(*arrays).compile()


def measured(shape: Shape, config: Config) -> list[dict]:
    arrays = inputs(shape)
    calls: dict[str, Any] = {}
    rows: dict[str, dict] = {}
    for implementation in IMPLEMENTATIONS:
        row = {**dataclasses.asdict(shape), "implementation": implementation}
        if implementation == "full" and 12 * shape.tokens * shape.vocabulary > config.full_gib * 2**30:
            continue
        try:
            calls[implementation] = compiled(shape, implementation, arrays)
            temp_bytes = calls[implementation].memory_analysis().temp_size_in_bytes
            rows[implementation] = {**row, "temp_bytes": temp_bytes}
            jax.block_until_ready(calls[implementation](*arrays))
        except Exception as error:  # what cannot run here must not hide the others
            calls.pop(implementation, None)
            rows[implementation] = {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    for implementation, times in turns(calls, arrays, config).items():
        spread = (max(times) - min(times)) / min(times)
        rows[implementation] |= {"ms": round(statistics.median(times), 4), "spread": round(spread, 3)}
    return list(rows.values())


def turns(calls: dict[str, Callable[..., Any]], arrays: tuple[Any, ...], config: Config) -> dict[str, list[float]]:
    """Milliseconds of a call of each implementation, in several turns."""

    def timed(call: Callable[..., Any], count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            out = call(*arrays)
        jax.block_until_ready(out)
        return (time.perf_counter() - began) * 1e3 / count

    counts = {name: max(1, int(config.turn_ms / timed(call, 2))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(config.turns + 1):
        for name, call in calls.items():
            ms = timed(call, counts[name])
            if turn:
                times[name].append(ms)
    return times


def operands_and_options(shape: Shape) -> tuple[Operands, Options]:
    """Operands and options of the call, as far as the cost model asks for them."""
    struct = jax.ShapeDtypeStruct
    x, w = (struct((n, shape.dim), shape.dtype) for n in (shape.tokens, shape.vocabulary))
    operands: Any = Operands(x, w, *[None] * (len(Operands._fields) - 2))  # type: ignore[arg-type]
    options = Options("vd", shape.vocabulary, 0.0, 0.0, None, 1.0, None, None, False, ("mosaic", "triton", "jnp"))
    return operands, options


def fit(name: str) -> None:
    rows = json.loads((record.RESULTS / f"{name}.json").read_text())["rows"]
    fields = [field.name for field in dataclasses.fields(Shape)]
    for model in choice.COSTS:
        amounts, ms, shapes = [], [], []
        for row in rows:
            if (
                row["implementation"].removesuffix("/triton" if model == "forward_grad" else "") == model
                and "ms" in row
            ):
                shapes.append(Shape(**{field: row[field] for field in fields}))
                terms = choice.terms(model, *operands_and_options(shapes[-1]), frozenset(shapes[-1].wanted))
                amounts.append([terms[term] for term in choice.COSTS[model]])
                ms.append(row["ms"])
        relative = np.asarray(amounts) / np.asarray(ms)[:, None]
        costs = np.linalg.lstsq(relative, np.ones(len(ms)), rcond=None)[0]
        print(model, dict(zip(choice.COSTS[model], costs.round(4).tolist(), strict=True)))
        for shape, ratio in zip(shapes, relative @ costs, strict=True):
            print(f"  {ratio:.2f} of the measured time: {shape}")


def main(config: Config) -> None:
    if config.fit:
        fit(config.name)
        return
    if config.smoke:
        config = dataclasses.replace(config, turns=2, turn_ms=1.0)
    began = time.perf_counter()
    rows: list[dict] = []
    for shape in SMOKE if config.smoke else SHAPES:
        if time.perf_counter() - began > config.time_limit:
            print(f"No time for {shape}", flush=True)
            continue
        jax.clear_caches()
        for row in measured(shape, config):
            print(row, flush=True)
            rows.append(row)
        path = record.save(config.name, rows)
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
