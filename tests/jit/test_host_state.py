"""State of an optimizer in the memory of the host: a step moves it to the device and back, under `memjax.jit` layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import memjax
from memjax._plan.memory.layout import local_bytes
from tests.jit.host_states import LAYERS, OPTIMIZERS, begin, step_of


def on_host(state):
    return jax.device_put(state, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def moved(eqns, length):
    """Shapes of what is moved between memories by straight lines of equations."""
    puts = [eqn for eqn in eqns if eqn.primitive.name == "device_put"]
    return [out.aval.shape for eqn in puts for out in eqn.outvars if out.aval.shape[:1] == (length,)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_moved_layer_by_layer_and_training_is_the_same(name):
    tx = OPTIMIZERS[name]
    params, state, x = begin(tx, jnp.float32 if name == "float32" else jnp.bfloat16)
    run = lambda moves: memjax.jit(step_of(tx, moves=moves), budget="min", donate_argnums=(0, 1))
    plain, step = run(False), run(True)
    copied, host = jax.tree.map(jnp.copy, (params, state)), on_host(state)
    assert step.plan(params, host, x).updates_in_loops
    eqns = step.trace(params, host, x).jaxpr.eqns
    bodies = [eqn.params["jaxpr"].eqns for eqn in eqns if eqn.primitive.name == "scan"]
    assert not moved(eqns, LAYERS)
    assert sum(len(moved(body, 1)) for body in bodies) == 2 * sum(leaf.ndim > 0 for leaf in jax.tree.leaves(state))
    for _ in range(3):
        copied, (params, host) = plain(*copied, x), step(params, host, x)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(host)}
    assert kinds == {"pinned_host"}
    for one, other in zip(*map(jax.tree.leaves, (copied, (params, host))), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_what_lies_on_the_host_takes_no_memory_of_a_device():
    class Gpu:
        platform = "gpu"

    class OnGpu:
        device_set, shard_shape = {Gpu()}, staticmethod(lambda shape: shape)

    aval = jax.typeof(on_host(jnp.ones((8, 8))))
    on_cpu = SingleDeviceSharding(jax.devices()[0])
    found = [
        local_bytes(one, sharding) for sharding in (OnGpu(), on_cpu) for one in (aval, jax.typeof(jnp.ones((8, 8))))
    ]
    assert found == [0, 256, 0, 256]
