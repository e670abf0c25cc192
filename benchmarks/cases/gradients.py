"""Compares ways to compute a gradient: time, temporary memory and error."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


def compare(
    ways: Mapping[str, Callable[..., Any]],
    args: tuple[Any, ...],
    *,
    rounds: int = 7,
    calls: int = 5,
    settle: float = 0,
    gradient_of: Callable[[Any], Any] = lambda result: result,
    show: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """A row for each way to compute a gradient.

    Times are medians over rounds in which all ways take turns: `ms` per execution of `calls` one after the other, `ms_sync` of
    one alone. The error is the distance from the gradient of the first way, relative to the size of that gradient.

    Args:
      ways: functions of `args` that return a gradient, a pytree, or what `compile_way` made of them. One that fails has a row
        that says why.
      args: arrays.
      settle: seconds for which all ways run before times are taken, as clocks of a GPU fall with its temperature.
      gradient_of: what a way returns -> the gradient.
      show: called with each row as soon as memory and error are known, and once more with all of it.
    """
    # One after the other: a GPU's compiler chooses kernels by their times, which another one at work would change.
    compiled = {name: compile_way(args, way) for name, way in ways.items()}
    rows: dict[str, dict[str, Any]] = {name: {"case": name} for name in ways}
    reference = None
    for name, program in compiled.items():
        try:
            if isinstance(program, Exception):
                raise program
            gradient = gradient_of(jax.block_until_ready(program(*args)))
        except Exception as error:  # one way that fails must not hide the others
            rows[name]["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            show(rows[name])
            continue
        reference = gradient if reference is None else reference
        rows[name]["temp_mib"] = round(program.memory_analysis().temp_size_in_bytes / 2**20, 1)
        rows[name]["gradient_error"] = float(relative_distance(gradient, reference))
        show(rows[name])
        del gradient
    del reference
    working = {name: program for name, program in compiled.items() if "error" not in rows[name]}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in working}
    begin = time.perf_counter()
    while time.perf_counter() - begin < settle:
        for program in working.values():
            _milliseconds(program, args, calls)
    for _ in range(rounds):
        for name, program in working.items():
            _milliseconds(program, args, 1)  # brings this way's memory and clocks into their usual state
            times[name].append((_milliseconds(program, args, calls), _milliseconds(program, args, 1)))
    for name, pairs in times.items():
        rows[name]["ms"], rows[name]["ms_sync"] = (
            round(statistics.median(column), 2) for column in zip(*pairs, strict=True)
        )
        show(rows[name])
    return list(rows.values())


@jax.jit
def relative_distance(tree: Any, reference: Any) -> jax.Array:
    """|a - b| / |b| of all leaves together, in float32."""
    squares = lambda a: jnp.sum(jnp.square(a.astype(jnp.float32)))
    apart = jax.tree.map(lambda a, b: squares(a.astype(jnp.float32) - b.astype(jnp.float32)), tree, reference)
    return jnp.sqrt(sum(jax.tree.leaves(apart)) / sum(map(squares, jax.tree.leaves(reference))))


def compile_way(args: tuple[Any, ...], f: Callable[..., Any]) -> Any:
    """The compiled function, or the exception that says why it cannot be compiled. What is one of these stays as it is."""
    if isinstance(f, jax.stages.Compiled | Exception):
        return f
    try:
        return jax.jit(f).lower(*args).compile()
    except Exception as error:
        return error


def _milliseconds(program: Any, args: tuple[Any, ...], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        gradient = program(*args)
    jax.block_until_ready(gradient)
    return 1e3 * (time.perf_counter() - begin) / calls
