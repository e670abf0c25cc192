"""Training steps of a small network, as people write them: each with its arguments and the options of `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax

WIDTH, LAYERS, EXAMPLES = 32, 3, 256
OPTIMIZER = optax.adamw(1e-3)
OPTIONS = memjax.remat_compiler_options()


class Step(NamedTuple):
    """`f(*args)`, the options that it is jitted with, and a share of its temporary bytes that it can do with."""

    f: Callable[..., Any]
    args: tuple
    options: dict[str, Any] = {}  # noqa: RUF012 it is not changed
    share: float = 0.6


def parameters(layers: int = LAYERS) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return jax.device_put([0.2 * rng.normal(size=(WIDTH, WIDTH)) for _ in range(layers)])


def batch(count: int = EXAMPLES) -> jax.Array:
    return jax.device_put(np.random.default_rng(1).normal(size=(count, WIDTH)))


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T)


def network(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = layer(w, x)
    return x


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(network(params, x) ** 2)


def scanned_loss(params: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0] ** 2)


def updating(loss: Callable[..., Any], optimizer: Any = OPTIMIZER) -> Callable[..., Any]:
    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def of(loss: Any, params: Any, optimizer: Any = OPTIMIZER) -> Step:
    return Step(updating(loss, optimizer), (params, optimizer.init(params), batch()), {"donate_argnums": (0, 1)})


def accumulating(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step that sums the gradients of two halves of the batch in a loop."""

    def step(params, state, x):
        def one(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

        gradients, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x.reshape(2, -1, WIDTH))
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def accumulation() -> Step:
    params = parameters()
    args = params, OPTIMIZER.init(params), batch(2 * EXAMPLES)
    return Step(accumulating(loss), args, {"donate_argnums": (0, 1)})


def alternating(layers: int = 2) -> Step:
    """Two networks, the second gradient being that of a loss with the first network as updated."""

    def step(one, other, x):
        less = lambda params, gradients: jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        one = less(one, jax.grad(lambda one: loss([*one, *other], x))(one))
        other = less(other, jax.grad(lambda other: loss([*one, *other], x))(other))
        return one, other

    params = parameters(2 * layers)
    return Step(step, (params[:layers], params[layers:], batch()))


def attacked() -> Step:
    """Gradients by the examples, one after another, then one by the parameters."""

    def step(params, x):
        for _ in range(3):
            x = x + 0.1 * jnp.sign(jax.grad(loss, 1)(params, x))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    return Step(step, (parameters()[:2], batch()))


def in_a_branch() -> Step:
    def step(params, x, number):
        update = lambda: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))
        return jax.lax.cond(number > 0, update, lambda: params)

    return Step(step, (parameters(), batch(), jnp.int32(1)))


def curvature() -> Step:
    """A product of the Hessian with a vector: forward over reverse."""
    step = lambda params, x: jax.jvp(lambda p: jax.grad(loss)(p, x), (params,), (params,))[1]
    return Step(step, (parameters(), batch()))


@jax.custom_vjp
def folded(x: jax.Array) -> jax.Array:
    """The same, with cotangents without signs: a rule that is not linear, at any scale."""
    return x


folded.defvjp(lambda x: (folded(x), None), lambda _, ct: (jnp.abs(ct),))


def forces() -> Step:
    """A loss of energies and of their slopes by positions: a gradient inside of the one by parameters."""

    def energies_of(params, x):
        for w in params:
            x = x + jnp.tanh(jax.nn.gelu(folded(x @ w)) @ w.T)
        return jnp.mean(jnp.sin(x), 1)

    def loss_of_forces(params, x):
        energies, pull = jax.vjp(lambda x: energies_of(params, x), x)
        return jnp.mean(energies**2) + jnp.mean((pull(jnp.ones_like(energies))[0] - 0.1) ** 2)

    # Gradients themselves, for what an optimizer makes of them can hide an error.
    return Step(jax.grad(loss_of_forces), (parameters(), batch()), share=0.5)


def pullback() -> Step:
    def step(params, x):
        y, pull = jax.vjp(lambda params: network(params, x), params)
        return pull(y)[0]

    return Step(step, (parameters(), batch()))


def checkpointed() -> Step:
    """With checkpoints of its own."""

    def loss(params, x):
        for w in params:
            x = jax.checkpoint(layer)(w, x)
        return jnp.mean(x**2)

    return of(loss, parameters())._replace(share=0.85)


def of_each_example() -> Step:
    step = lambda params, x: jax.vmap(jax.grad(loss), (None, 0))(params, x.reshape(4, -1, WIDTH))
    return Step(step, (parameters(), batch()))


def by_shard_map() -> Step:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def step(params, x):
        def local(params, x):
            value, gradients = jax.value_and_grad(lambda p: jax.lax.pmean(loss(p, x), "d"))(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=(P(), P()))(params, x)

    place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    return Step(step, (place(parameters(), P()), place(batch(4 * EXAMPLES), P("d"))), {"donate_argnums": 0})


def fully_sharded(kind: Any) -> Step:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    gathered = (lambda w: jax.sharding.reshard(w, NamedSharding(mesh, P()))) if kind == AxisType.Explicit else None
    whole = loss if gathered is None else lambda params, x: loss([*map(gathered, params)], x)
    params = jax.device_put(parameters(), NamedSharding(mesh, P("d")))
    x = jax.device_put(batch(8 * EXAMPLES), NamedSharding(mesh, P("d")))
    return Step(updating(whole), (params, OPTIMIZER.init(params), x), {"donate_argnums": (0, 1)})


STEPS = {
    "layers": lambda: of(loss, parameters()),
    "a scan over layers": lambda: of(scanned_loss, jnp.stack(parameters())),
    "optax.MultiSteps and clipping": lambda: of(
        loss, parameters(), optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZER), 2)
    ),
    "accumulation in a loop": accumulation,
    "alternating updates": alternating,
    "an attack before the gradient": attacked,
    "a branch": in_a_branch,
    "forward over reverse": curvature,
    "forces in the loss": forces,
    "the pullback of jax.vjp": pullback,
    "checkpoints in the step": checkpointed,
    "vmap of a gradient": of_each_example,
    "shard_map": by_shard_map,
    "fully sharded": lambda: fully_sharded(AxisType.Auto),
    "fully sharded, explicit axes": lambda: fully_sharded(AxisType.Explicit),
}


def held(compiled):
    """Bytes of arguments, results that are no donated arguments, temporaries and code."""
    found = compiled.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes + found.generated_code_size_in_bytes


def within(share, step):
    """Bytes that leave so much of the temporaries of a step, compiled by itself."""
    compiled = jax.jit(step.f, **step.options).lower(*step.args).compile(OPTIONS)
    return held(compiled) - int((1 - share) * compiled.memory_analysis().temp_size_in_bytes)
