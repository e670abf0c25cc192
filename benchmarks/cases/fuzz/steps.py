"""Training steps of random programs: gradients, an optimizer, and what people put round them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases.fuzz.programs import Program


class Step(NamedTuple):
    """`f(*args)`, the options that it is jitted with, and its kind, for people."""

    f: Callable[..., Any]
    args: tuple
    options: dict[str, Any]
    kind: str


def _momentum(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, state), state


def _adam(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    """With gradients clipped by their norm, and a rather large epsilon: what is divided by has no rounding to speak of."""
    norm = jnp.sqrt(sum(jnp.sum(g.astype(jnp.float64) ** 2) for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1, 10 / norm).astype(g.dtype), gradients)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[0], gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, state[1], gradients)
    moved = lambda p, m, v: p - 0.01 * m / (jnp.sqrt(v + 1e-4))
    return jax.tree.map(moved, params, first, second), (first, second)


def step(program: Program, seed: int) -> Step:
    """A step of the program, by another random choice."""
    rng = np.random.default_rng([seed, 1])
    params, h, others, data = program.args
    kind = str(rng.choice(["plain"] * 4 + ["accumulated", "in turns", "adversarial", "guarded", "of examples"]))
    adam = bool(rng.random() < 0.5)
    update = _adam if adam else _momentum
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    state = (zeros(), zeros()) if adam else zeros()
    loss = program.loss
    differentiate = jax.value_and_grad(loss, has_aux=program.has_aux)

    def plain(params, state, h, others, data):
        found, gradients = differentiate(params, h, others, data)
        return *update(params, state, gradients), found

    def accumulated(params, state, parts, others, data):
        def one(total, h):
            found, gradients = differentiate(params, h, others, data)
            return jax.tree.map(jnp.add, total, gradients), found

        gradients, found = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)
        return *update(params, state, gradients), found

    def in_turns(params, state, parts, others, data):
        def one(carry, h):
            params, state, found = plain(carry[0], carry[1], h, others, data)
            return (params, state), found

        (params, state), found = jax.lax.scan(one, (params, state), parts)
        return params, state, found

    def adversarial(params, state, h, others, data):
        slope = jax.grad(lambda h: value_of(params, h, others, data))(h)
        return plain(params, state, h + 0.1 * slope / (1e-3 + jnp.linalg.norm(slope)), others, data)

    def value_of(*args):
        return loss(*args)[0] if program.has_aux else loss(*args)

    def guarded(params, state, h, others, data):
        found, gradients = differentiate(params, h, others, data)
        finite = jnp.isfinite(sum(jnp.sum(g) for g in jax.tree.leaves(gradients)))
        params, state = jax.lax.cond(finite, lambda: update(params, state, gradients), lambda: (params, state))
        return params, state, found

    def of_examples(params, state, parts, others, data):
        found, gradients = jax.vmap(differentiate, (None, 0, None, None))(params, parts, others, data)
        return *update(params, state, jax.tree.map(lambda g: g.mean(0), gradients)), found

    steps = {"plain": plain, "adversarial": adversarial, "guarded": guarded}
    in_parts = {"accumulated": accumulated, "in turns": in_turns, "of examples": of_examples}
    if kind in in_parts:
        h = jnp.stack([h * (1 + 0.1 * i) for i in range(2)])
    donated = {"donate_argnums": (0, 1)} if rng.random() < 0.5 else {}
    name = f"{kind}, {'adam' if adam else 'momentum'}{', donated' * bool(donated)}"
    return Step((steps | in_parts)[kind], (params, state, h, others, data), donated, name)
