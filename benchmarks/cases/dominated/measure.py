"""Measures the tools of one network beside plans of their bytes: `python -m benchmarks.cases.dominated.measure --case JSON`."""

import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import memjax
from benchmarks.cases.compiled_work import work
from benchmarks.cases.dominated import NETWORKS, ring
from benchmarks.cases.dominated.network import Loss, Network, Tool
from memjax._jit.candidates import held_bytes

ROUNDS, MOST_SECONDS, AS_FAST = 7, 4.0, 1.03
EXACT = ("recompute", "tile")


def gradient(loss: Loss, args: tuple[Any, ...]) -> Any:
    step = jax.jit(jax.value_and_grad(loss), compiler_options=dict(memjax.remat_compiler_options()))
    return step.lower(*args).compile()


def temp(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def flops(program: Any) -> float | None:
    """FLOPs of products and convolutions. Those in a loop count once for each turn; None if the turns are not known."""
    try:
        return work(program.as_text()).flops
    except AssertionError:
        return None


def refused_or(make: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What is made, or why not, and how long that takes."""
    begun = time.perf_counter()
    try:
        made, why = make(), {}
    except ValueError as error:
        made, why = None, {"refused": str(error)[:300]}
    return made, {"seconds": round(time.perf_counter() - begun, 1), **why}


def by_turns(programs: list[Any], args: tuple[Any, ...]) -> list[list[float]]:
    """Seconds of the processor for each program, once a round; the first round is not counted.

    Not those of the clock: other programs on the machine take time from each in turn, and would count.
    """
    times: list[list[float]] = [[] for _ in programs]
    begun, rounds = time.perf_counter(), 0
    while rounds < ROUNDS + 1 or (rounds < 5 * ROUNDS and time.perf_counter() - begun < MOST_SECONDS):
        for program, taken in zip(programs, times, strict=True):
            start = time.process_time()
            jax.block_until_ready(program(*args))
            taken.append(time.process_time() - start)
        rounds += 1
    return [taken[1:] for taken in times]


def ratio(times: list[float], others: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(times, others, strict=True)), 4)


def off(program: Any, wanted: Any, args: tuple[Any, ...]) -> float:
    """How far gradients are from those of the plain loss, relative to the largest of each array."""
    apart = lambda a, b: float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-6))
    return max(jax.tree.leaves(jax.tree.map(apart, program(*args)[1], wanted)))


def point(network: Network, tool: Tool, plain: Any, wanted: Any) -> dict[str, Any]:
    """A tool beside a plan, and beside that of a whole step where the plan is refused or slower."""
    args = network.args
    by_tool = gradient(tool.loss, args)
    allow = (*EXACT, "compress") if tool.rounds else EXACT
    planned = lambda: gradient(memjax.planned(network.loss, budget=temp(by_tool), allow=allow), args)
    whole = lambda: memjax.jit(
        jax.value_and_grad(network.loss), budget=held_bytes(by_tool), allow=(*allow, "microbatch")
    )
    row: dict[str, Any] = {"bytes": temp(by_tool), "plain_bytes": temp(plain), "rounds": tool.rounds}
    row |= {"flops": flops(by_tool), "plain_flops": flops(plain), "error": off(by_tool, wanted, args)}
    for way, make in (("planned", planned), ("jit", lambda: whole().lower(*args).compile())):
        program, row[way] = refused_or(make)
        times = by_turns([one for one in (plain, by_tool, program) if one is not None], args)
        row |= {"ms": round(1e3 * statistics.median(times[1]), 3), "time": ratio(times[1], times[0])}
        if program is not None:
            row[way] |= {"bytes": temp(program), "flops": flops(program), "error": off(program, wanted, args)}
            row[way] |= {"time": ratio(times[2], times[0]), "to_tool": ratio(times[2], times[1])}
            if row[way]["to_tool"] <= AS_FAST:
                break
    return row


def main(case: dict[str, Any]) -> dict[str, Any]:
    if case["network"] == ring.NAME:
        return ring.measure()
    network = NETWORKS[case["network"]](pathlib.Path(case["models_path"]))
    plain = gradient(network.loss, network.args)
    wanted = plain(*network.args)[1]
    return {"rows": [{"tool": name} | point(network, tool, plain, wanted) for name, tool in network.tools.items()]}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[sys.argv.index("--case") + 1]))))
