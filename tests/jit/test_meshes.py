"""`memjax.jit` on meshes, and in loops as people write them there: bytes of one device, and what policies by hand reach."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from memjax._core.compat import scan_counts
from tests.jit.steps import (
    EXAMPLES,
    OPTIMIZER,
    OPTIONS,
    STEPS,
    Step,
    accumulating,
    batch,
    held,
    layer,
    loss,
    of,
    parameters,
    scanned_loss,
    updating,
    within,
)
from tests.jit.test_jit import close, copied


def test_bytes_within_a_shard_map_are_those_of_a_device():
    step = STEPS["shard_map"]()
    [plan] = memjax.jit(step.f, budget=within(0.6, step), **step.options).plan(*step.args).passes
    assert plan.first_nbytes > 0.5 * plan.nbytes


@pytest.mark.parametrize(
    ("step_of", "loss"), [(updating, scanned_loss), (accumulating, scanned_loss), (accumulating, loss)]
)
def test_gradients_and_their_sums_are_there_while_loops_run(step_of, loss):
    """Each takes an eighth of all bytes here, or more."""
    layers = parameters(8)
    params = layers if loss is not scanned_loss else jnp.stack(layers)
    step = Step(step_of(loss), (params, OPTIMIZER.init(params), batch(32)), {"donate_argnums": (0, 1)})
    jitted = memjax.jit(step.f, budget=within(0.7, step), allow=("recompute",), **step.options)
    found = jitted.explain_peak(*step.args)
    assert found.predicted == pytest.approx(found.compiled, rel=0.06)


def test_a_loop_reads_no_array_that_is_one_number():
    """JAX puts what is the same in all turns outside of the loop. With a checkpoint by hand it is inside."""

    def attending(w, x):
        scores = jnp.where(jnp.tri(EXAMPLES, dtype=bool), x @ w @ x.T, -jnp.inf)
        return x + jax.nn.softmax(scores) @ x

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (attending(w, x), None), x, params)[0] ** 2)

    def read_by_loops(traced):
        scans = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan"]
        atoms = [atom for eqn in scans for atom in eqn.invars[: scan_counts(eqn)[0]]]
        return [atom.aval.shape for atom in atoms if atom.aval.dtype == jnp.float32]

    step = of(loss, jnp.stack(parameters()))
    assert (EXAMPLES, EXAMPLES) in read_by_loops(jax.jit(step.f).trace(*step.args))
    jitted = memjax.jit(step.f, budget="min", **step.options)
    assert (EXAMPLES, EXAMPLES) not in read_by_loops(jitted.trace(*step.args))
    close(jitted(*copied(step.args)), jax.jit(step.f)(*step.args))


def fully_sharded(params, x, *spec):
    """Arguments of a step on eight devices."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    params = jax.tree.map(lambda a: place(a, *spec), params)
    return (*of(None, params).args[:2], place(x, "d"))


def test_a_sharded_parameter_is_gathered_as_often_as_by_hand():
    """In a loop over layers: once in the forward pass, and once for all of the backward pass."""

    def step_of(layer):
        def loss(params, x):
            return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0] ** 2)

        return updating(loss)

    args = fully_sharded(jnp.stack(parameters()), batch(8 * EXAMPLES), None, "d")
    by_hand = jax.jit(step_of(jax.checkpoint(layer))).lower(*args).compile(OPTIONS)
    jitted = memjax.jit(step_of(layer), budget=held(by_hand))
    found = jitted.lower(*args).compile(OPTIONS)
    assert 0 < found.as_text().count(" all-gather(") <= by_hand.as_text().count(" all-gather(")
    close(jitted(*args), jax.jit(step_of(layer))(*args))


def test_a_gathered_parameter_is_not_kept_for_the_backward_pass():
    """Here gathered parameters take half as much as what is kept of a layer: within the bytes of a policy its work is enough."""

    def feed_forward(w, x):
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        return x + jax.nn.gelu(normed @ w[0]) @ w[1]

    def step_of(layer):
        def loss(params, x):
            for w in params:
                x = layer(w, x)
            return jnp.mean(x**2)

        return updating(loss)

    rng = np.random.default_rng(0)
    params = [[0.1 * rng.normal(size=shape) for shape in ((64, 256), (256, 64))] for _ in range(4)]
    args = fully_sharded(*jax.device_put((params, rng.normal(size=(2048, 64)))), "d")
    policy = jax.checkpoint_policies.dots_saveable
    donated = {"donate_argnums": (0, 1)}
    by_hand = jax.jit(step_of(jax.checkpoint(feed_forward, policy=policy)), **donated).lower(*args).compile(OPTIONS)
    found = memjax.jit(step_of(feed_forward), budget=held(by_hand), **donated).lower(*args).compile(OPTIONS)
    assert held(found) <= held(by_hand)
    assert found.cost_analysis()["flops"] <= 1.05 * by_hand.cost_analysis()["flops"]


def test_gradients_are_not_put_off_until_the_end_of_the_backward_pass():
    """On a mesh a layer waits for what came of the layer before the last, or XLA hides sending behind all products of weights."""

    def step(params, x):
        gradients = jax.grad(loss)(params, x)
        return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)]

    def made_by(params, x):
        jitted = memjax.jit(step, budget=held(jax.jit(step).lower(params, x).compile()) // 2, allow=("recompute",))
        program = jitted.trace(params, x).jaxpr.jaxpr
        names = {out: eqn.primitive.name for eqn in program.eqns for out in eqn.outvars}
        return [names[out] for out in program.outvars]

    params, x = parameters(), batch(8 * EXAMPLES)
    sharded, _, x_there = fully_sharded(params, x, "d")
    first, *_, last = made_by(sharded, x_there)
    assert (first, last) == ("sub", "optimization_barrier")
    assert "optimization_barrier" not in made_by(params, x)


def test_a_sharded_step_that_fits_is_the_program_of_jax_jit():
    """Without donation as well: results are counted as a device's parts."""
    step = STEPS["fully sharded"]()
    args = *step.args[:2], step.args[2][:8]
    plain = jax.jit(step.f)
    jitted = memjax.jit(step.f, budget=held(plain.lower(*args).compile()))
    assert jitted.plan(*args).as_written
    assert jitted.lower(*args).as_text() == plain.lower(*args).as_text()
