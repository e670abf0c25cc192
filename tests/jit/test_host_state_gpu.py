"""State, and what loops keep, on the host of a GPU: training is that with nothing there, bit for bit.

XLA:GPU once read what loops had moved to the host in the wrong order, without a word. So layers differ in their weights, and
every array is compared.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from tests.jit.host_states import LAYERS, OPTIMIZERS, begin, step_of

pytestmark = pytest.mark.gpu


def keeping(plan, first, *, on_host):
    """The plan with what its loop keeps on the host or not; that of the first turns never."""
    stretches = []
    for one in plan.passes[0].stretches:
        if one.turns is None:
            stretches.append(one)
            continue
        in_memory = lambda on_host, one=one: tuple(kept._replace(on_host=on_host) for kept in one.kept)
        if first:
            stretches.append(one._replace(turns=first, kept=in_memory(False), in_blocks=None))
        handed_on = 0 if first else one.handed_on
        turns = LAYERS - first
        stretches.append(one._replace(turns=turns, kept=in_memory(on_host), handed_on=handed_on, in_blocks=None))
    return dataclasses.replace(plan, passes=(dataclasses.replace(plan.passes[0], stretches=tuple(stretches)),))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("where", "first"), [("state", 0), ("kept", 0), ("kept", 2), ("both", 0), ("both", 2)])
def test_training_is_that_with_nothing_on_the_host(name, where, first):
    tx = OPTIMIZERS[name]
    *state, x = begin(tx, jnp.float32 if name == "float32" else jnp.bfloat16)
    jitted = lambda **how: memjax.jit(step_of(tx, moves=False), donate_argnums=(0, 1), **how)
    plan = jitted(budget="min", allow=("recompute",)).plan(*state, x)
    least = plan if where == "kept" else jitted(budget="min", allow=("recompute", "offload")).plan(*state, x)
    assert plan.updates_in_loops
    assert least.updates_in_loops
    assert bool(least.on_host) == (where != "kept")
    copied, moved = jax.tree.map(jnp.copy, state), state
    plain, moving = jitted(plan=plan), jitted(plan=keeping(least, first, on_host=where != "state"))
    for _ in range(3):
        copied, moved = plain(*copied, x), moving(*moved, x)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(moved)}
    assert kinds == ({"device"} if where == "kept" else {"device", "pinned_host"})
    back = jax.device_put(moved, jax.memory.Space.Device)
    for one, found in zip(*map(jax.tree.leaves, (copied, back)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(found))
