"""Optimizers whose state lies in codes: which arrays, errors of updates, hard gradients, composition, checkpoints, meshes."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from memjax import compress
from memjax.compress._state.minifloat import Coded

SHAPE = (128, 64)


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def codes_of(state):
    is_code = lambda node: isinstance(node, Coded)
    return [node for node in jax.tree.leaves(state, is_leaf=is_code) if is_code(node)]


def run(tx, params, gradients, jit=jax.jit):
    """Parameters and state after these gradients, one after another."""

    @jit
    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state = jit(tx.init)(params)
    for g in gradients:
        params, state = step(params, state, g)
    return params, state


PARAMS = {"w": normal(*SHAPE, seed=1), "bias": jnp.zeros(64)}
GRADIENTS = [jax.tree.map(lambda p, i=i: normal(*p.shape, seed=10 + i), PARAMS) for i in range(3)]

OPTIMIZERS = {
    "adamw": (optax.adamw(1e-2), [True, False]),
    "lion": (optax.lion(1e-2), [True]),
    "momentum": (optax.sgd(1e-2, momentum=0.9), [True]),
    "rmsprop": (optax.rmsprop(1e-2), [False]),
    "stddev": (optax.rmsprop(1e-2, centered=True), []),
    "adafactor": (optax.adafactor(1e-2, min_dim_size_to_factor=256), [False]),
    "amsgrad": (optax.amsgrad(1e-2), [True, False]),
    "adagrad": (optax.adagrad(1e-2), [False]),
    "clipped": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2), optax.ema(0.9)), [True, False, True]),
    "masked": (optax.masked(optax.adam(1e-2), {"w": True, "bias": False}), [True, False]),
    "several": (
        optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, {"w": "a", "bias": "b"}),
        [True, False],
    ),
    "injected": (optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2), [True, False]),
    "accumulated": (optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), [True, False, True]),
    "schedule-free": (optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2), []),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_of_any_optimizer_are_found(name):
    tx, signs = OPTIMIZERS[name]
    small = memjax.compressed(tx)
    assert type(small) is type(tx)
    state = jax.eval_shape(small.init, PARAMS)
    assert [code.signed for code in codes_of(state)] == signs
    assert all(code.shape == SHAPE for code in codes_of(state))
    assert jax.eval_shape(compress.decoded, state) == jax.eval_shape(tx.init, PARAMS)
    updates, after = jax.eval_shape(small.update, PARAMS, state, PARAMS)
    assert updates == jax.eval_shape(lambda: PARAMS)
    assert jax.tree.structure(after) == jax.tree.structure(state)


# The first steps of Adam are signs of gradients: accumulated in codes, small ones have the other sign sometimes.
@pytest.mark.parametrize(
    ("name", "off"), [("clipped", 0.05), ("several", 0.05), ("injected", 0.05), ("accumulated", 0.12)]
)
def test_updates_are_close_in_any_composition(name, off):
    tx, _ = OPTIMIZERS[name]
    wanted, _ = run(tx, PARAMS, GRADIENTS)
    found, _ = run(memjax.compressed(tx), PARAMS, GRADIENTS)
    change, error = wanted["w"] - PARAMS["w"], found["w"] - wanted["w"]
    assert 0 < jnp.linalg.norm(error) < off * jnp.linalg.norm(change)
    np.testing.assert_allclose(found["bias"], wanted["bias"], rtol=1e-5, atol=1e-7)


def test_it_composes_with_halves_in_either_order():
    params = {"w": PARAMS["w"].astype(jnp.bfloat16)}
    gradients = [{"w": g["w"].astype(jnp.bfloat16)} for g in GRADIENTS]
    inside = compress.split_master(memjax.compressed(optax.adamw(1e-2)))
    outside = memjax.compressed(compress.split_master(optax.adamw(1e-2)))
    several = optax.MultiSteps(outside, 1).gradient_transformation()
    results = [run(tx, params, gradients) for tx in (inside, outside, several)]
    assert [len(codes_of(state)) for _, state in results] == [2, 2, 2]
    masters = [compress.join_master(*result)["w"] for result in results]
    np.testing.assert_allclose(masters[0], masters[1], atol=3e-3)
    wanted, _ = run(
        optax.adamw(1e-2),
        {"w": params["w"].astype(jnp.float32)},
        [{"w": g["w"].astype(jnp.float32)} for g in gradients],
    )
    for master in masters:
        np.testing.assert_allclose(master, wanted["w"], atol=6e-3)


def predicted_error(b1, b2):
    """The error of Adam's updates in 8 bits, relative to their size, where gradients are noise. Codes have 4 bits of mantissa.

    A step s, of which a change passes a share f beyond the grid, adds a variance of s^2 f (1 - f), and this decays as the
    moment does. A momentum changes by more than a step, so that f is anything: s^2 / 6. The root halves errors of nu.
    """
    rng = np.random.default_rng(0)
    step = 2.0**-4 / 2 ** rng.random(10**5)
    of_momentum = np.mean(step**2) / 6 / (1 - b1**2)
    change = (1 - b2) * (rng.normal(size=10**5) ** 2 - 1) / step
    share = change - np.floor(change)
    of_square = np.mean(step**2 * share * (1 - share)) / (1 - b2**2)
    return np.sqrt(of_momentum + of_square / 4)


@pytest.mark.parametrize("bits", [8, 4])
def test_errors_of_updates_are_as_predicted(bits):
    """With gradients that are noise, which is the worst: nothing is left of a momentum after its time."""
    tx = optax.adam(1.0, b2=0.99)
    small = memjax.compressed(tx, bits=bits)

    def step(states, key):
        g = jax.random.normal(key, SHAPE)
        return (tx.update(g, states[0])[1], small.update(g, states[1])[1]), None

    zeros = jnp.zeros(SHAPE)
    keys = jax.random.split(jax.random.key(0), 400)

    @jax.jit
    def exact_and_coded(keys):
        states, _ = jax.lax.scan(step, (tx.init(zeros), small.init(zeros)), keys)
        return states[0][0], compress.decoded(states[1])[0]

    exact, coded = jax.device_get(exact_and_coded(keys))
    update = lambda s: s.mu / np.sqrt(s.nu)
    error = np.linalg.norm(update(coded) - update(exact)) / np.linalg.norm(update(exact))
    if bits == 8:
        assert error == pytest.approx(predicted_error(0.9, 0.99), rel=0.15)
    else:
        assert error < 0.6
    # Right on average.
    assert np.mean(coded.nu) / np.mean(exact.nu) == pytest.approx(1, abs=0.02)
    assert abs(np.mean(coded.mu - exact.mu)) < 4 * np.std(coded.mu - exact.mu) / zeros.size**0.5


def test_hard_gradients_give_no_nan_and_move_no_parameter_by_a_code():
    """Spikes of 1e4, a column that never gets a gradient, one that gets none after a while: 1000 steps."""
    rng, shape = np.random.default_rng(0), (64, 64)
    gradients = rng.normal(size=(1000, *shape)).astype(np.float32)
    gradients[rng.random(gradients.shape) < 1e-5] = 1e4
    gradients[:, :, 3], gradients[20:, :, 7] = 0, 0
    params = np.asarray(normal(*shape))

    def trained(tx):
        """The parameters after the last step, the state as it is when decoded, and the column's path."""

        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params[:, 7]

        @jax.jit
        def run(params, gradients):
            (params, state), path = jax.lax.scan(step, (params, tx.init(params)), gradients)
            return params, compress.decoded(state), path

        return jax.device_get(run(params, gradients))

    tx = optax.adam(1e-3)
    wanted, _, wanted_path = trained(tx)
    for bits in (8, 4):
        found, state, path = trained(memjax.compressed(tx, bits=bits))
        assert np.all(np.isfinite(found))
        np.testing.assert_array_equal(found[:, 3], params[:, 3])
        after = [np.max(np.abs(p[-1] - p[100])) for p in (path, wanted_path)]
        assert after[0] <= after[1] + 1e-3  # a step of Adam
        sizes = [np.linalg.norm(p - params) for p in (found, wanted)]
        assert 0.6 < sizes[0] / sizes[1] < 1.2
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


def test_training_at_twice_the_best_rate_does_not_diverge():
    """Of the rates 0.005, 0.01, and so on to 1.28, 0.08 is the best after 300 steps, in float32 and in codes."""
    x, w, start = normal(256, 64, seed=3), normal(64, 64, seed=4) / 8, normal(64, 64, seed=5)
    loss = lambda params: jnp.mean(jnp.square(jnp.tanh(x @ params) - jnp.tanh(x @ w)))

    def losses(tx):
        def step(carry, _):
            params, state = carry
            value, g = jax.value_and_grad(loss)(params)
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.device_get(jax.jit(lambda start: jax.lax.scan(step, (start, tx.init(start)), length=300)[1])(start))

    exact = losses(optax.adam(0.16))
    for bits in (8, 4):
        found = losses(memjax.compressed(optax.adam(0.16), bits=bits))
        assert np.all(np.isfinite(found))
        assert found[-1] < 1.3 * exact[-1]


def test_a_run_can_change_bits_or_leave():
    eight, four = (memjax.compressed(optax.adam(1e-2), bits=bits) for bits in (8, 4))
    params, state = run(eight, PARAMS, GRADIENTS)
    decoded = jax.jit(compress.decoded)
    plain = decoded(state)
    assert jax.tree.structure(plain) == jax.tree.structure(jax.eval_shape(optax.adam(1e-2).init, PARAMS))
    back = jax.jit(compress.encoded_like)(plain, state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(decoded(back)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(x, y)  # what is on the grid stays
    template = jax.eval_shape(four.init, PARAMS)
    other = jax.jit(lambda plain: compress.encoded_like(plain, template))(plain)
    assert [code.bits for code in codes_of(other)] == [4, 4]
    jax.jit(four.update)(GRADIENTS[0], other, params)


def test_a_checkpoint_continues_on_another_mesh(tmp_path):
    tx = memjax.compressed(optax.adamw(1e-2))
    mesh = lambda *sizes: jax.make_mesh(sizes, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = lambda tree, mesh: jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, P("a", "b") if x.ndim == 2 else P())), tree
    )
    _, alone = run(tx, PARAMS, GRADIENTS)
    state = put(alone, mesh(4, 2))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
    template = put(jax.tree.map(np.zeros_like, state), mesh(2, 1))
    with ocp.StandardCheckpointer() as saver:
        found = saver.restore(tmp_path / "state", template)
    params = put(PARAMS, mesh(2, 1))
    updates = [jax.jit(tx.update)(GRADIENTS[0], s, params)[0] for s in (alone, found)]
    np.testing.assert_allclose(updates[0]["w"], updates[1]["w"], rtol=1e-6)


@pytest.mark.parametrize("spec", [P("a", None), P(None, "a")])
def test_sharded_state_is_coded_without_a_collective(spec):
    tx = memjax.compressed(optax.adam(1e-2))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put(normal(256, 512), NamedSharding(mesh, spec))
    state = jax.jit(tx.init)(params)
    place = lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 2 else P()))
    state = jax.tree.map(place, state)
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    compiled = jax.jit(tx.update, out_shardings=shardings).lower(params, state, params).compile()
    text = compiled.as_text()
    assert not [name for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute") if name in text]
    updates, _ = compiled(params, state, params)
    alone, _ = jax.jit(tx.update)(*jax.tree.map(np.asarray, (params, state, params)))
    np.testing.assert_allclose(updates, alone, rtol=1e-5)


@pytest.mark.parametrize(("bits", "most"), [(8, 1.04), (4, 0.56)])
def test_bytes_of_the_state(bits, most):
    """Those that a compiled step returns."""
    layers = [jnp.zeros((256, 512)), jnp.zeros((3, 5, 48, 64)), jnp.zeros((64, 1000))]
    tx = memjax.compressed(optax.adam(1e-2), bits=bits)
    state = jax.eval_shape(tx.init, layers)
    compiled = jax.jit(lambda *args: tx.update(*args)[1]).lower(layers, state, layers).compile()
    values = 2 * sum(layer.size for layer in layers)
    assert compiled.memory_analysis().output_size_in_bytes <= most * values + 1024


@pytest.mark.parametrize("bits", [8, 4])
def test_an_update_holds_no_decoded_arrays(bits):
    """Nor levels of 4 bits before they are packed: of four arrays, all temporary bytes are less than one array in float32."""
    layers = [jnp.zeros((256, 512)) for _ in range(4)]
    tx = memjax.compressed(optax.adam(1e-2), bits=bits)

    def step(weights, state, gradients):
        updates, state = tx.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    # XLA:CPU begins all arrays at once by default.
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    lowered = jax.jit(step).lower(layers, jax.eval_shape(tx.init, layers), layers)
    assert lowered.compile(options).memory_analysis().temp_size_in_bytes < layers[0].nbytes


def test_where_and_small_arrays():
    codes = lambda **options: codes_of(jax.eval_shape(memjax.compressed(optax.adam(1e-2), **options).init, PARAMS))
    assert [code.signed for code in codes(where="mu/*")] == [True]
    assert [code.signed for code in codes(where=lambda path, x: path.endswith("nu/w"))] == [False]
    assert not codes(smallest=10**6)
    with pytest.raises(ValueError, match="where must be a pattern or predicate for paths in the state"):
        codes(where="kernel")


class Own(typing.NamedTuple):
    kept: typing.Any


def test_states_that_nobody_knows_stay_exact_with_a_warning():
    tx = optax.GradientTransformation(
        lambda params: Own(jax.tree.map(jnp.zeros_like, params)), lambda g, s, p=None: (g, s)
    )
    small = memjax.compressed(optax.chain(optax.adam(0.1), tx))
    with pytest.warns(UserWarning, match="does not know what is in Own: arrays there stay exact"):
        state = jax.eval_shape(small.init, PARAMS)
    assert len(codes_of(state)) == 2


def test_errors_say_what_does_not_apply():
    for options, message in [
        ({"codec": compress.BlockQuantized(8)}, "codec must be left out for an optimizer"),
        ({"sigma": 0.1}, "sigma must be left out"),
        ({"inputs": 1}, "inputs must be left out"),
        ({"bits": 3}, "bits must be 8 or 4 for an optimizer"),
        ({"where": "conv"}, "where must be a pattern for paths in the state"),
    ]:
        with pytest.raises(ValueError, match=message):
            memjax.compressed(optax.adam(0.1), **options)
    tx = memjax.compressed(optax.adam(0.1))
    with pytest.raises(TypeError, match="state must be a state in codes"):
        tx.update(PARAMS, optax.adam(0.1).init(PARAMS), PARAMS)
