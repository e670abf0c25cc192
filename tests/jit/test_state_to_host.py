"""`allow=("offload",)` puts optimizer state into the memory of the host where a step does not fit otherwise."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import memjax
from memjax import compress
from memjax._jit.host.state import state_of
from tests.jit.host_states import LAYERS, OPTIMIZERS, begin, step_of

ALLOW = ("recompute", "tile", "microbatch", "offload")
ADAM = optax.adamw(1e-2)


@functools.cache
def least_of_adam():
    """Bytes of a step of AdamW in float32, whatever its rate."""
    f, args = step_of(ADAM, moves=False), begin(ADAM, jnp.float32)
    return memjax.jit(f, budget="min", donate_argnums=(0, 1)).plan(*args).nbytes


def fitted(f, args, share=0.75, least=None, **options):
    """The step under `memjax.jit`, with a part of the least bytes that it takes with nothing on the host."""
    options = {"donate_argnums": (0, 1)} | options
    least = least or memjax.jit(f, budget="min", **options).plan(*args).nbytes
    return memjax.jit(f, budget=int(share * least), allow=ALLOW, **options)


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def assert_equal(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_fits_and_training_is_the_same(name, count):
    params, state, x = begin(OPTIMIZERS[name], jnp.float32 if name == "float32" else jnp.bfloat16)
    plainly = jax.jit(step_of(OPTIMIZERS[name], moves=False))
    least = least_of_adam() if name == "float32" else None
    step = fitted(step_of(OPTIMIZERS[name], moves=False), (params, state, x), 0.6 if least else 0.7, least)
    plan = step.plan(params, state, x)
    assert plan.updates_in_loops
    program = step.lower(params, state, x).compile()
    count.clear()
    before, plain, now = jax.tree.leaves(state), (params, state), jax.device_put((params, state), may_alias=False)
    for _ in range(3):
        plain, given = plainly(*plain, x), now
        now = step(*given, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert not count
    assert not any(leaf.is_deleted() for leaf in before)
    assert_equal(plain, now)
    # What lies where, and that no copy of all layers is among the temporaries.
    on_device = [leaf for leaf in jax.tree.leaves((now, x)) if leaf.sharding.memory_kind == "device"]
    on_host = [leaf for leaf in jax.tree.leaves(now) if leaf.sharding.memory_kind == "pinned_host"]
    held = sum(leaf.nbytes for leaf in on_device) + program.memory_analysis().temp_size_in_bytes
    assert held <= plan.nbytes <= plan.budget
    assert sum(leaf.nbytes for leaf in on_host) == plan.host_nbytes > 0
    assert kinds(now[0]) == {"device"}
    [loop] = [eqn for eqn in step.trace(params, state, x).jaxpr.eqns if "dynamic_update_slice" in str(eqn.params)]
    turns = [eqn.outvars[0].aval for eqn in loop.params["jaxpr"].eqns if eqn.primitive.name == "device_put"]
    assert [aval.shape[0] for aval in turns] == [1] * 2 * sum(leaf.shape[:1] == (LAYERS,) for leaf in on_host)


def test_without_a_scan_state_is_moved_array_by_array():
    def step(params, state, x):
        def loss(params):
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        updates, state = ADAM.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = [jnp.eye(64) + 0.1 * i for i in range(4)]
    args = params, jax.jit(ADAM.init)(params), jnp.ones((8, 64))
    fits = memjax.jit(step, budget="min", allow=ALLOW, donate_argnums=(0, 1))
    eqns = fits.trace(*args).jaxpr.eqns
    puts = [eqn.outvars[0].aval.memory_space for eqn in eqns if eqn.primitive.name == "device_put"]
    on_device = [*itertools.accumulate(1 if to == jax.memory.Space.Device else -1 for to in puts)]
    assert len(puts) == 4 * len(params)
    assert on_device[-1] == 0 < max(on_device) <= 2
    # They wait for their gradient and, but for the first ones, for the two that were moved before.
    barriers = [eqn.invars for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    waits = [sum(map(is_on_host, atoms)) for atoms in barriers if is_on_host(atoms[0]) and not is_on_host(atoms[1])]
    assert waits.count(3) >= 2 * (len(params) - 1)
    assert_equal(fits(*jax.device_put(args, may_alias=False)), jax.jit(step)(*args))


def is_on_host(atom):
    return atom.aval.memory_space == jax.memory.Space.Host


def test_state_is_taken_from_wherever_it_is(count):
    args = begin(ADAM, jnp.float32)
    f = step_of(ADAM, moves=False)
    step, plainly = fitted(f, args, least=least_of_adam()), jax.jit(f)
    params, state = step(*jax.device_put(args, may_alias=False))
    expected = plainly(*plainly(*args[:2], args[2]), args[2])
    count.clear()
    copies = jax.device_put((params, jax.device_put(state, jax.memory.Space.Device)), may_alias=False)
    assert_equal(step(*copies, args[2]), expected)  # on the device again
    assert not count
    # In another process a checkpoint is restored to the shardings that it was saved with.
    restored = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), leaf.sharding), (params, state))
    roomy = memjax.jit(f, budget=2**30, allow=ALLOW, donate_argnums=(0, 1))
    out = roomy(*jax.device_put(restored, may_alias=False), args[2])
    assert_equal(out, expected)
    assert kinds(out) == {"device"}
    again = fitted(f, args, least=least_of_adam())
    assert again.plan(*restored, args[2]).on_host
    assert again.frontier(*restored, args[2]) == again.frontier(*args)
    assert again.explain(*restored, args[2]).residual_bytes == again.explain(*args).residual_bytes
    out = again(*restored, args[2])
    assert_equal(out, expected)
    assert "pinned_host" in kinds(out[1])


def test_a_plan_is_data(tmp_path, count):
    tx = optax.adamw(3e-2)  # no other test has compiled this step, so that it is kept on disk
    args = begin(tx, jnp.float32)
    step = fitted(step_of(tx, moves=False), args, least=least_of_adam(), cache_dir=tmp_path)
    plan = step.plan(*args)
    [note] = [note for note in plan.notes if note.startswith("offload")]
    assert f"{plan.host_nbytes / 1024:.2f} KiB of state lie in the host's pinned memory" in note
    assert f"{plan.host_nbytes / 2**10:.2f} KiB of state on the host" in str(plan)
    acting = memjax.jit(step_of(tx, moves=False), plan=memjax.StepPlan.from_json(plan.to_json()), donate_argnums=(0, 1))
    expected = jax.jit(step_of(tx, moves=False))(*args)
    assert_equal(acting(*jax.device_put(args, may_alias=False)), expected)
    count.clear()
    out = step.asking()(*jax.device_put(args, may_alias=False))
    assert not count  # it was kept on disk
    assert_equal(out, expected)
    assert "pinned_host" in kinds(out[1])
    with pytest.raises(ValueError, match="state on the host that cannot be there"):
        memjax.jit(step_of(tx, moves=False), plan=plan).plan(*args)


def test_the_least_memory_has_all_state_on_the_host():
    args = begin(ADAM, jnp.float32)
    step = memjax.jit(step_of(ADAM, moves=False), budget="min", allow=ALLOW, donate_argnums=(0, 1))
    assert step.plan(*args).host_nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(args[1]) if leaf.ndim)
    assert_equal(step(*jax.device_put(args, may_alias=False)), jax.jit(step_of(ADAM, moves=False))(*args))


def test_nnx_objects_are_updated_in_place():
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    class Model(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(64, 256, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(
                256, rngs=nnx.Rngs(0)
            )  # its averages are read by no derivative either, and are small

        def __call__(self, x):
            return self.norm(jnp.tanh(self.dense(x)))

    def objects():
        model = Model()
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    x = jnp.ones((8, 64))
    one, other = objects(), objects()
    fits, plainly = fitted(step, (*one, x)), nnx.jit(step)
    for _ in range(2):
        assert fits(*one, x) == plainly(*other, x)
    assert_equal(nnx.state(one), nnx.state(other))
    assert "pinned_host" in kinds(nnx.state(one[1]))
    assert kinds(nnx.state(one[0])) == {"device"}


def test_state_on_a_mesh_stays_divided():
    mesh = Mesh(np.array(jax.devices()), "data")
    place = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(None, "data") if leaf.ndim > 1 else P()))
    params, state, x = begin(ADAM, jnp.float32)
    params, state, x = *jax.tree.map(place, (params, state)), jax.device_put(x, NamedSharding(mesh, P("data")))
    step = fitted(step_of(ADAM, moves=False), (params, state, x))
    plan, expected = step.plan(params, state, x), jax.jit(step_of(ADAM, moves=False))(params, state, x)
    out = step(*jax.device_put((params, state), may_alias=False), x)
    on_host = [leaf for leaf in jax.tree.leaves(out) if leaf.sharding.memory_kind == "pinned_host"]
    assert all(leaf.sharding.spec == P(None, "data") for leaf in on_host)
    assert sum(leaf.nbytes for leaf in on_host) == 8 * plan.host_nbytes > 0
    assert_equal(out, expected)


def test_options_of_jit_are_kept():
    f = step_of(ADAM, moves=False)
    args = begin(ADAM, jnp.float32)
    here = SingleDeviceSharding(jax.devices()[0])

    def scaled(power, params, state, x):
        return f(params, state, x**power)

    options = {"static_argnums": 0, "donate_argnums": (1, 2), "in_shardings": here, "out_shardings": (here, None)}
    step = fitted(scaled, (2, *args), least=least_of_adam(), **options)
    out = step(2, *jax.device_put(args, may_alias=False))
    assert_equal(out, jax.jit(scaled, static_argnums=0)(2, *args))
    assert (kinds(out[0]), "pinned_host" in kinds(out[1])) == ({"device"}, True)
    named = memjax.jit(
        lambda *, params, state, x: f(params, state, x), budget="min", allow=ALLOW, donate_argnames=("params", "state")
    )
    given = dict(zip(("params", "state", "x"), jax.device_put(args, may_alias=False), strict=True))
    assert kinds(named(**given)[1]) == {"pinned_host"}


def test_a_step_whose_state_cannot_be_moved_is_refused_with_the_reason():
    args = begin(ADAM, jnp.float32)
    with pytest.raises(
        ValueError, match=r"budget is .* but .*\n(.*\n)*note: offload: the step has no state .*donate_argnums"
    ):
        memjax.jit(step_of(ADAM, moves=False), budget=2**19, allow=ALLOW).plan(*args)
    with pytest.raises(ValueError, match="the least possible is"):  # all of it there is not enough
        memjax.jit(step_of(ADAM, moves=False), budget=2**18, allow=ALLOW, donate_argnums=(0, 1)).plan(*args)


CHAINS = {
    "decayed before momentum": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    "accumulated": optax.MultiSteps(ADAM, 2),
    "skipped": optax.apply_if_finite(ADAM, 3),
    "masters in codes": compress.split_master(memjax.compressed(ADAM)),
    "4 bits": memjax.compressed(ADAM, bits=4),
    "averaged": optax.chain(ADAM, optax.ema(0.9)),
    "trust": optax.lamb(1e-3),
}


@pytest.mark.parametrize("name", CHAINS)
def test_state_is_told_from_weights_and_each_from_its_new_value(name):
    params, state, x = begin(CHAINS[name], jnp.bfloat16 if "masters" in name else jnp.float32)
    traced = jax.jit(step_of(CHAINS[name], moves=False), donate_argnums=(0, 1)).trace(params, state, x)
    given, made = (jax.tree_util.tree_leaves_with_path(tree) for tree in (traced.args_info[0], traced.out_info))
    donated = [k for k, (_, info) in enumerate(given) if info.donated]
    found = state_of(traced.jaxpr, donated)
    assert {given[k][0]: made[i][0] for k, i in found.items()} == {given[k][0]: given[k][0] for k in found}
    of_state = {k for k in donated if given[k][0][0].idx == 1 and given[k][1]._aval.ndim}
    assert found.keys() == of_state
    sizes = [given[k][1]._aval.size * given[k][1]._aval.dtype.itemsize for k in found]
    assert sizes == sorted(sizes, reverse=True)


def test_what_a_derivative_reads_is_no_state():
    def step(params, mean, x):  # the loss reads an average of what it predicts
        loss = lambda p: jnp.mean((p * x - mean) ** 2)
        return params - 0.1 * jax.grad(loss)(params), 0.9 * mean + 0.1 * jnp.tanh(x)

    traced = jax.jit(step, donate_argnums=(0, 1)).trace(*[jnp.ones((64, 64))] * 3)
    assert state_of(traced.jaxpr, {0, 1}) == {}
