"""State of an optimizer in the memory of the host: a step moves it to the device and back, under `memjax.jit` layer by layer."""

import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import memjax
from memjax._core.arrays import is_on_host
from memjax._core.program.dataflow import Dataflow
from memjax._jit.account import donated_results
from memjax._jit.updates.in_loop import with_updates_in_loops
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
    plain = jax.jit(step_of(tx, moves=False))
    step = memjax.jit(step_of(tx, moves=True), budget="80%", donate_argnums=(0, 1))
    expected, host = (params, state), on_host(state)
    assert step.plan(params, host, x).updates_in_loops
    eqns = step.trace(params, host, x).jaxpr.eqns
    bodies = [eqn.params["jaxpr"].eqns for eqn in eqns if eqn.primitive.name == "scan"]
    assert not moved(eqns, LAYERS)
    assert sum(len(moved(body, 1)) for body in bodies) == 2 * sum(leaf.ndim > 0 for leaf in jax.tree.leaves(state))
    params = jax.device_put(params, may_alias=False)
    for _ in range(3):
        expected, (params, host) = plain(*expected, x), step(params, host, x)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(host)}
    assert kinds == {"pinned_host"}
    for one, other in zip(*map(jax.tree.leaves, (expected, (params, host))), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_gpus_it_is_read_where_its_gradient_is_made(name):
    """XLA begins to move an array shortly before it is read. So the state of a gradient is moved while that is computed."""
    tx = OPTIMIZERS[name]
    params, state, x = begin(tx, jnp.float32 if name == "float32" else jnp.bfloat16)
    args = params, on_host(state), x
    traced = jax.jit(step_of(tx, moves=True), donate_argnums=(0, 1)).trace(*args)
    results = []
    for platform in ("cpu", "gpu"):
        closed = with_updates_in_loops(traced.jaxpr, donated_results(traced), platform).closed
        results.append(jax.jit(jax.extend.core.jaxpr_as_fun(closed))(*jax.tree.leaves(args)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    [_, loop] = [eqn for eqn in closed.eqns if eqn.primitive.name == "scan"]
    flow = Dataflow(loop.params["jaxpr"].eqns)
    puts = [eqn for eqn in flow.eqns if eqn.primitive.name == "device_put" and not is_on_host(eqn.outvars[0].aval)]
    assert len(puts) == sum(leaf.ndim > 1 for leaf in jax.tree.leaves(state))
    for put in puts:
        [reader] = [flow.eqns[i] for i in flow.readers[put.outvars[0]]]
        assert reader.primitive.name == "optimization_barrier"
        [gradient] = [atom for atom in reader.invars if atom.aval.ndim == 2]  # others are slices, of one layer
        assert gradient.aval.shape[0] == put.outvars[0].aval.shape[1]
        assert {"dot_general", "transpose"} & {flow.makers[gradient].primitive.name}


def test_slices_on_the_host_are_numbered_by_constants():
    """XLA:GPU copies them without a kernel then, as it sees that they follow one another. Others are numbered as they were."""
    tx = OPTIMIZERS["float32"]
    params, state, x = begin(tx, jnp.float32)
    for where, constants in ((on_host, 1), (lambda state: state, 0)):
        jitted = lambda constants=constants, **how: memjax.jit(
            step_of(tx, moves=bool(constants)), donate_argnums=(0, 1), **how
        )
        planned = jitted(budget="min").plan(params, where(state), x)
        assert planned.updates_in_loops
        for plan in (planned, dataclasses.replace(planned, passes=(None,) * len(planned.passes))):
            jaxpr = jitted(plan=plan).trace(params, where(state), x).jaxpr
            loop = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"][-1]
            numbers = [atom for atom in loop.invars if atom.aval.dtype == jnp.uint32 and atom.aval.ndim == 1]
            made = [atom for atom in numbers if any(atom in eqn.outvars for eqn in jaxpr.eqns)]
            assert (len(numbers), len(made)) == (1 + constants, 1)


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
