"""A solve of diffrax by plans beside its own checkpoints: temporary bytes and time of value and gradient.

Run `python -m benchmarks.solve` on a CPU with diffrax installed: ten minutes on two cores. It writes `results/solve_cpu.json`.
Plans are of the solve with `DirectAdjoint`, a bounded loop whose backward pass JAX makes. `RecursiveCheckpointAdjoint`, which
diffrax takes by default, keeps a number of states that follows from `max_steps`, or `checkpoints` of them. All run in turns in
one process: `ratio` is the median, over rounds, of the time by that of the default.
"""

import functools
import statistics
import time
from typing import Any

import diffrax
import jax
import jax.numpy as jnp

import memjax
from benchmarks import record

BATCH, FEATURES, HIDDEN, MOST_STEPS = 64, 32, 64, 4096
ROUNDS = 40
SHARES = (0.9, 0.45, 0.23)  # of the bytes of the default
END, TIMES = 30.0, 50  # of the first case, which reads the end alone, and how many times the second reads


def loss(params, y0, adjoint, times):
    """Mean square of the solution of a neural ODE, and how many steps it took."""
    field = lambda t, y, p: jnp.tanh(y @ p["w1"] + t) @ p["w2"]
    found = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        0.0,
        END if times is None else END / 3,
        0.05,
        y0,
        args=params,
        saveat=diffrax.SaveAt(t1=True) if times is None else diffrax.SaveAt(ts=jnp.linspace(0, END / 3, times)),
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
        max_steps=MOST_STEPS,
        adjoint=adjoint,
    )
    return jnp.mean(found.ys**2), found.stats["num_steps"]


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(keys[0], (FEATURES, HIDDEN)) / FEATURES**0.5,
        "w2": jax.random.normal(keys[1], (HIDDEN, FEATURES)) / HIDDEN**0.5,
    }
    return params, jax.random.normal(keys[2], (BATCH, FEATURES))


def compiled(f):
    options: Any = memjax.remat_compiler_options()
    step = jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))
    return step.lower(*arguments()).compile(compiler_options=options)


def temp(step) -> int:
    return step.memory_analysis().temp_size_in_bytes


def measure(times) -> list[dict]:
    by = lambda adjoint: functools.partial(loss, adjoint=adjoint, times=times)
    own = "RecursiveCheckpointAdjoint()"
    steps = {own: compiled(by(diffrax.RecursiveCheckpointAdjoint()))}
    steps["RecursiveCheckpointAdjoint(16)"] = compiled(by(diffrax.RecursiveCheckpointAdjoint(checkpoints=16)))
    direct = by(diffrax.DirectAdjoint())
    steps["DirectAdjoint()"] = compiled(direct)
    planning = {}
    for budget in (int(share * temp(steps[own])) for share in SHARES):
        start = time.perf_counter()
        try:
            plan = memjax.plan(direct, *arguments(), budget=budget, argnums=(0, 1))
        except ValueError as error:
            print(budget, error)
            continue
        planning[f"budget {budget}"] = time.perf_counter() - start
        steps[f"budget {budget}"] = compiled(memjax.planned(direct, plan=plan))
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(*arguments()))
            spent[name].append(time.perf_counter() - start)
    (_, turns), expected = steps[own](*arguments())
    rows = []
    for name, step in steps.items():
        _, found = step(*arguments())
        errors = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)), found, expected)
        ratios = [a / b for a, b in zip(spent[name], spent[own], strict=True)]
        rows.append(
            {
                "times": times,
                "steps": int(turns),
                "how": name,
                "temp": temp(step),
                "ms": 1e3 * statistics.median(spent[name]),
                "ratio": statistics.median(ratios),
                "gradient_error": max(map(float, jax.tree.leaves(errors))),
                "planning_s": planning.get(name),
            }
        )
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    found = []
    for times in (None, TIMES):
        found += measure(times)
        record.save("solve_cpu", found, on_cpu=True)
