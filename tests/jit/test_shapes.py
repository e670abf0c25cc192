"""On meshes of which axes split only some of the arrays, predictions are of what a device has of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from tests.jit.steps import OPTIONS, held

LAYERS, WIDTH, HIDDEN, ROWS = 4, 32, 128, 512


def feed_forward(w, x):
    return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) + x


def arguments(mesh, *specs, stacked):
    """Weights of layers, split so, and rows of a batch."""
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, P(*([None] * (a.ndim - 2)), *spec)))
    lead = (LAYERS,) if stacked else ()
    rng = np.random.default_rng(0)
    draw = lambda: [
        place(np.float32(0.1 * rng.normal(size=(*lead, *shape))), spec)
        for shape, spec in zip(((WIDTH, HIDDEN), (HIDDEN, WIDTH)), specs, strict=True)
    ]
    params = draw() if stacked else [draw() for _ in range(LAYERS)]
    state = jax.tree.map(jnp.zeros_like, (params, params))
    return params, state, place(np.float32(rng.normal(size=(ROWS, WIDTH))), ("data", None))


def step_of(loss):
    """Gradient descent with momentum, say: two arrays of state for each parameter."""

    def step(params, state, x):
        gradients = jax.grad(loss)(params, x)
        state = jax.tree.map(lambda s, g: 0.9 * s + g, state, (gradients, jax.tree.map(jnp.square, gradients)))
        return jax.tree.map(lambda w, m: w - 0.1 * m, params, state[0]), state

    return step


@pytest.mark.smoke
def test_activations_that_one_axis_alone_splits_are_counted_as_large_as_they_are():
    """Tensor parallelism: between two layers what a layer hands on is whole along the axis that splits its hidden layer."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    whole = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (whole(feed_forward(w, x)), None), x, params)
        return jnp.mean(
            x[:, jnp.arange(WIDTH)[::-1]] ** 2
        )  # the gradient of a gather has a program among its parameters

    args = arguments(mesh, (None, "model"), ("model", None), stacked=True)
    step = step_of(loss)
    plain = held(jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile(OPTIONS))
    jitted = memjax.jit(step, budget=int(0.8 * plain), allow=("recompute",), donate_argnums=(0, 1))
    found = jitted.explain_peak(*args)
    assert found.predicted == pytest.approx(found.compiled, rel=0.1)
    assert f"float32[{LAYERS},{ROWS // 2},{WIDTH}]" in str(found)


def test_parameters_that_are_gathered_for_a_layer_are_counted_while_it_runs_and_not_kept():
    """Each part of a layer gathers what it reads, in the backward pass as well."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    gathered = lambda w, x: feed_forward([jax.sharding.reshard(one, P()) for one in w], x)

    def loss(params, x):
        for w in params:
            x = gathered(w, x)
        return jnp.mean(x**2)

    with jax.set_mesh(mesh):
        args = arguments(mesh, ("data",), ("data",), stacked=False)
        step = step_of(loss)
        plain = held(jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile(OPTIONS))
        jitted = memjax.jit(step, budget=int(0.7 * plain), allow=("recompute",), donate_argnums=(0, 1))
        found = jitted.explain_peak(*args)
        [plan] = jitted.plan(*args).passes
    assert found.predicted == pytest.approx(found.compiled, rel=0.1)
    assert not any("reshard" in kept.what for stretch in plan.stretches for kept in stretch.kept)
    assert max(stretch.handed_on for stretch in plan.stretches) <= ROWS // 8 * HIDDEN * 4
