"""The controller and transactional steps: bounds by the paper's equations, statistics of gradients, overflows without a trace."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax import compress, compressed
from memjax._residuals import residuals
from memjax.compress import Layers
from memjax.compress._training.layers import LADDER, Statistics
from tests.compress.codecs.round_trip import normal
from tests.compress.networks import conv

SHAPE = (4, 8, 8, 16)


def weights(convolutions=2):
    return {f"conv{i}": jnp.asarray(np.float32(0.1) * normal(3, 3, 16, 16, seed=i)) for i in range(convolutions)}


def network(params, x):
    for i in range(len(params)):
        x = jax.nn.relu(conv(x, params[f"conv{i}"]))
    return x


def loss(codec, params, x):
    return jnp.mean(jnp.square(compressed(network, codec, where="conv", inputs=True)(params, x) - 1))


def batch(seed, scale=1.0):
    return jnp.asarray(np.float32(scale) * normal(*SHAPE, seed=seed))


@functools.cache
def found_layers(convolutions=2, **options):
    """The layers of a network with so many convolutions. With one, programs are half as large."""
    return compress.layers(loss, weights(convolutions), batch(0), **options)


gradient = jax.jit(jax.grad(loss, (0, 1)))  # of the weights, too: without them nothing is saved


def test_layers_are_found_with_their_weights():
    layers = found_layers(bound=2**-4, bits_per_value=6)
    assert [name.split("/")[-1] for name in layers.names] == ["conv0", "conv1"]
    assert layers.weights == tuple((name,) for name in layers.names)
    assert layers.shapes == ((SHAPE, np.dtype(np.float32)),) * 2
    assert layers.nbytes() == 2 * compress.ErrorBounded(0.1, bits_per_value=6).nbytes(batch(0))
    kept = lambda codec: residuals(jax.jit(jax.grad(loss, 1)).trace(codec, weights(), batch(0)).jaxpr).device.nbytes
    # Statistics cost nothing between forward and backward.
    assert 0 <= kept(layers) - kept(compress.ErrorBounded(2**-4, bits_per_value=6)) < 64
    with pytest.raises(ValueError, match=r"settings for the 3 arrays that are encoded, got settings for 2"):
        jax.grad(lambda x: jnp.sum(compressed(lambda x: jnp.sin(jnp.sin(jnp.sin(x))), layers)(x)))(batch(0))
    with pytest.raises(ValueError, match="nothing of it is encoded"):
        compress.layers(lambda codec, x: jnp.sum(x), batch(0))


def test_statistics_are_what_they_are_called():
    layers, params, x = found_layers(bound=2**-4), weights(), batch(1)
    got, _ = gradient(layers, params, x)
    assert not np.any(got.bound)
    codec = compress.ErrorBounded(2**-4)

    @jax.jit
    def exact(params, x):
        """What each convolution reads, what is decoded of it, its code, and the cotangent of what it gives."""
        acts = [x, jax.nn.relu(conv(x, params["conv0"]))]
        codes = [codec.encode(act) for act in acts]
        of_output = lambda i: jax.grad(functools.partial(rest, i, params))(conv(acts[i], params[f"conv{i}"]))
        return acts, [codec.without_signs().decode(code) for code in codes], codes, list(map(of_output, range(2)))

    def rest(at, params, out):  # the loss from the at-th convolution's output on
        for i in range(at, 2):
            out = conv(out, params[f"conv{i}"]) if i > at else out
            out = jax.nn.relu(out)
        return jnp.mean(jnp.square(out - 1))

    for i, (act, decoded, code, ct) in enumerate(zip(*jax.device_get(exact(params, x)), strict=True)):
        # Weights are exact, so cotangents are, and zeros stay zeros.
        # One of 16 channels; a tap at an edge of the 3x3 meets padding at one of 8 positions.
        share = (22 / 24) ** 2 / 16
        np.testing.assert_allclose(got.statistics.power[i, 0], share * np.sum(np.square(ct)), rtol=1e-4)
        np.testing.assert_allclose(got.statistics.cotangent[i, 0], np.mean(np.abs(ct)), rtol=1e-4)
        np.testing.assert_allclose(got.statistics.nonzero[i], np.mean(act != 0), rtol=1e-6)
        np.testing.assert_allclose(got.statistics.magnitude[i], np.mean(np.abs(decoded)), rtol=1e-5)
        np.testing.assert_allclose(got.statistics.bits[i], code.needed_bits_per_value, rtol=1e-6)
        rung = int(got.statistics.rung[i])
        assert LADDER[rung - 1] < code.needed_bits_per_value <= LADDER[rung]
    np.testing.assert_array_equal(got.statistics.examples, 4)
    np.testing.assert_array_equal(got.statistics.overflows, 0)
    small = dataclasses.replace(layers, bits_per_value=(None, 1.0))
    np.testing.assert_array_equal(gradient(small, params, x)[0].statistics.overflows, [0, 1])


def test_statistics_are_of_so_many_samples():
    layers, params, x = found_layers(1, bound=2**-4, samples=None), weights(1), batch(1)
    exact, few, one = (
        gradient(dataclasses.replace(layers, samples=samples), params, x)[0].statistics for samples in (None, 512, 1)
    )
    np.testing.assert_allclose(exact.power, gradient(found_layers(1, bound=2**-4), params, x)[0].statistics.power)
    assert not np.any(few.power == exact.power)
    np.testing.assert_allclose(few.power, exact.power, rtol=0.3)  # of 512 of 4,096 values
    assert np.all(np.isfinite(one.power))
    assert not np.any(one.power == few.power)
    with pytest.raises(ValueError, match=r"samples must be None or an integer of at least 1, got 0"):
        found_layers(samples=0)


def test_statistics_add_up_over_devices_and_examples():
    layers, params, x = found_layers(1, bound=2**-4), weights(1), np.concatenate([batch(i) for i in range(4)])
    whole = gradient(layers, params, x)[0].statistics
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    in_specs = (jax.P(), jax.P(), jax.P("data"))

    def of_device(codec, params, x):
        return jax.lax.pmean(loss(codec, params, x), "data")

    def inside(codec, params, x):  # gradients taken by each device; bounds and weights are shared
        return jax.grad(of_device, (0, 1))(codec, params, x)

    around = jax.grad(jax.shard_map(of_device, mesh=mesh, in_specs=in_specs, out_specs=jax.P()), (0, 1))
    spread = jax.shard_map(inside, mesh=mesh, in_specs=in_specs, out_specs=jax.P())
    one_by_one = jax.grad(lambda *args: jnp.mean(jax.vmap(loss, (None, None, 0))(*args)), (0, 1))
    for take, data in ((around, x), (spread, x), (one_by_one, x.reshape(4, 4, *SHAPE[1:]))):
        got = jax.jit(take)(layers, params, data)[0].statistics
        np.testing.assert_allclose(got.power, whole.power, rtol=1e-3)
        np.testing.assert_array_equal(got.uses, 4)
        np.testing.assert_array_equal(got.examples, 16)
        np.testing.assert_allclose(got.nonzero / got.uses, whole.nonzero, rtol=1e-5)
        np.testing.assert_allclose(got.cotangent[:, 0] / got.uses, whole.cotangent[:, 0], rtol=1e-3)
        np.testing.assert_array_equal(got.needed.sum(1), 4)
        assert (got.rung >= whole.rung).all()


def test_bounds_follow_the_equations():
    """A quarter as many updates as the interval, so at powers of two; then at the interval."""
    tx = compress.adaptive(optax.sgd(0.01, momentum=0.9), interval=5, sigma=0.02, coarsest=0.5)
    params = {"net": weights(), "codec": found_layers(bound=2**-3)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, x):
        gradients = jax.grad(lambda p: loss(p["codec"], p["net"], x))(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, gradients

    plain, plain_state = optax.sgd(0.01, momentum=0.9), None

    @jax.jit
    def plain_step(gradients, state, params):
        updates, state = plain.update(gradients, state)
        return optax.apply_updates(params, updates), state

    sums, changed, capped = [], [], set()
    for i in range(1, 11):
        before = params
        params, state, gradients = step(params, state, batch(i))
        plain_state = plain_state or plain.init(before["net"])
        want, plain_state = plain_step(gradients["net"], plain_state, before["net"])
        chex.assert_trees_all_close(*jax.device_get((params["net"], want)), rtol=1e-6)
        sums.append(jax.device_get(gradients["codec"].statistics))
        if not state.since:
            changed.append(i)
            mean = jax.tree.map(lambda *leaves: np.mean(leaves, 0), *sums)
            momentum = [np.mean(np.abs(plain_state[0].trace[f"conv{j}"])) for j in range(2)]
            want = 0.02 * np.array(momentum) / np.sqrt(mean.nonzero * mean.power[:, 0] / 3)
            widest = 0.5 / 2 * mean.magnitude / mean.nonzero
            # The nearest power of two: of what lies evenly on a logarithmic scale the square is that of `want` on average.
            want *= np.sqrt(8 / 3 * np.log(2))
            capped.update((want > widest).tolist())
            np.testing.assert_array_equal(params["codec"].bound, 2.0 ** np.floor(np.log2(np.minimum(want, widest))))
            sums = []
        else:
            np.testing.assert_array_equal(params["codec"].bound, before["codec"].bound)
    assert changed == [1, 2, 4, 5, 10]
    assert capped == {False, True}
    assert isinstance(params["codec"], Layers)
    assert not any(map(np.any, jax.tree.leaves(params["codec"].statistics)))


@functools.partial(jax.jit, static_argnums=0)
def updated(tx, params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def bounds_after_an_update(found, **options):
    """Bounds of arrays with these statistics, which are 0.3 before. The mean momentum of all gradients is a half."""
    ones, names = jnp.ones_like(found.uses), [f"w{i}" for i in range(len(found.uses))]
    layers = Layers(
        0.3 * ones,
        jax.tree.map(jnp.zeros_like, found),
        bits_per_value=(None,) * len(names),
        names=tuple(names),
        weights=tuple((name,) for name in names),
        shapes=((SHAPE, np.dtype(np.float32)),) * len(names),
    )
    tx = compress.adaptive(optax.sgd(1.0, momentum=0.9), **options)
    params = {"net": dict.fromkeys(names, jnp.ones(())), "codec": layers}
    gradients = {
        "net": dict.fromkeys(names, jnp.full((), -0.5)),
        "codec": dataclasses.replace(layers, statistics=found),
    }
    return np.asarray(updated(tx, params, tx.init(params), gradients)[0]["codec"].bound)


def statistics_of(power):
    """Statistics of arrays of ones that are used once, with these sums of squares of cotangents."""
    ones = np.ones(len(power), np.float32)
    of_ones = {"uses": ones, "examples": ones, "nonzero": ones, "magnitude": ones}
    return Statistics.zeros(len(power), 1)._replace(**of_ones, power=jnp.asarray(power)[:, None])


def test_sigma_is_the_root_mean_square_over_arrays():
    """A hundred arrays have cotangents of all sizes."""
    sigma = 0.02
    found = statistics_of(2.0 ** (0.02 + 2 * np.arange(100) / 25).astype(np.float32))
    bound = bounds_after_an_update(found, sigma=sigma, coarsest=jnp.inf)
    realised = np.asarray(compress.predicted_sigma(found, jnp.asarray(bound)))[:, 0] / 0.5
    np.testing.assert_allclose(np.sqrt(np.mean(realised**2)), sigma, rtol=0.02)
    assert 0.67 < (realised / sigma).min() < 0.72
    assert 1.3 < (realised / sigma).max() < 1.37


@pytest.mark.parametrize("coarsest", [1.0, np.inf])
def test_bounds_of_what_has_no_cotangents_stay(coarsest):
    bound = bounds_after_an_update(statistics_of(np.float32([0, 1])), sigma=0.02, coarsest=coarsest)
    np.testing.assert_array_equal(bound, np.float32([0.3, 2**-6]))


def test_the_papers_coefficient():
    found = Statistics.zeros(1, 1)._replace(
        uses=jnp.ones(1), examples=jnp.full(1, 64.0), nonzero=jnp.full(1, 0.25), cotangent=jnp.full((1, 1), 0.5)
    )
    got = compress.predicted_sigma(found, jnp.full(1, 0.125), coefficient=0.32)
    np.testing.assert_allclose(got, 0.32 * 0.5 * np.sqrt(64 * 0.25) * 0.125, rtol=1e-6)


def test_scaled_gradients_have_the_statistics_of_scaled_losses():
    args = found_layers(1), weights(1), batch(0)
    got, want = jax.jit(
        lambda *args: (
            compress.scale_gradient(jax.grad(loss, (0, 1))(*args), 0.25),
            jax.grad(lambda *args: 0.25 * loss(*args), (0, 1))(*args),
        )
    )(*args)
    chex.assert_trees_all_close(got, want, rtol=1e-5)


gradient_of_scaled = jax.jit(jax.grad(lambda params, x, by: by * loss(params["codec"], params["net"], x)))


def stepped(tx, by=1.0, steps=3):
    """Parameters after so many steps of a loss `by` times as large."""
    params = {"net": weights(1), "codec": found_layers(1, bound=2**-3)}
    state = jax.jit(tx.init)(params)
    for i in range(steps):
        params, state = updated(tx, params, state, gradient_of_scaled(params, batch(i), by))
    return jax.device_get(params)


def test_errors_are_clipped_with_gradients():
    sgd, clip = optax.sgd(0.01, momentum=0.9), optax.clip_by_global_norm(1e-3)
    plain, clipped = compress.adaptive(sgd), compress.adaptive(sgd, clip=clip)
    first = [stepped(tx, steps=1)["net"] for tx in (compress.adaptive(optax.chain(clip, sgd)), plain)]
    chex.assert_trees_all_close(stepped(clipped, steps=1)["net"], first[0], rtol=1e-5)
    assert not np.allclose(*(net["conv0"] for net in first), rtol=1e-5)
    # Of gradients that all are clipped only the direction counts.
    chex.assert_trees_all_close(stepped(clipped), stepped(clipped, by=100.0), rtol=1e-3)
    # Another scale is that of the loss.
    scaled = stepped(compress.adaptive(sgd, clip=optax.scale(0.25)))
    chex.assert_trees_all_close(scaled, stepped(plain, by=0.25), rtol=1e-5)
    # As a part of `tx` it makes bounds stricter.
    inside = stepped(compress.adaptive(optax.chain(optax.scale(0.25), sgd), coarsest=jnp.inf), steps=1)
    own = stepped(compress.adaptive(sgd, clip=optax.scale(0.25), coarsest=jnp.inf), steps=1)
    np.testing.assert_allclose(inside["codec"].bound, own["codec"].bound / 4, rtol=1e-5)


def test_nothing_to_clip():
    """Gradients of zero, of which no scale can be found."""
    found = stepped(compress.adaptive(optax.sgd(0.01), clip=optax.clip_by_global_norm(1.0)), by=0.0)
    chex.assert_trees_all_close(found["net"], jax.device_get(weights(1)))
    assert np.isfinite(found["codec"].bound).all()


def trained(steps, capacity, force=lambda step: False, ahead=False):
    """Parameters, optimizer, statistics and a key after so many steps of batches of varying scale; and the replays."""
    tx = compress.adaptive(optax.sgd(0.01, momentum=0.9), interval=16)
    params = {"net": weights(), "codec": found_layers.__wrapped__(bound=2**-3, bits_per_value=capacity)}  # donated
    state = {"params": params, "optimizer": tx.init(params), "mean": jnp.zeros(16), "key": jax.random.key(0)}

    def step(state, x):
        key, own = jax.random.split(state["key"])
        x = x * jnp.exp(jax.random.normal(own))
        gradients = jax.grad(lambda p: loss(p["codec"], p["net"], x))(state["params"])
        updates, optimizer = tx.update(gradients, state["optimizer"], state["params"])
        mean = 0.9 * state["mean"] + 0.1 * jnp.mean(x, (0, 1, 2))
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer, "mean": mean, "key": key}, jnp.mean(x)

    run = compress.transactional(step, window=10**6, margin=2, ahead=ahead)
    outs = []
    for i in range(steps):
        if force(i):
            run.capacities = [(capacity,) * 2]
        state, out = run(state, batch(i % 8))
        outs.append(out)
    return run.finish(state), outs, run


def values(state):
    state = {**state, "key": jax.random.key_data(state["key"])}
    return jax.tree.leaves(state)


def test_capacities_follow_the_need():
    """Up at once, to what was needed and no further; down when a window has needed less."""
    tx = compress.adaptive(optax.sgd(0.01), interval=10**6)
    params = {"net": weights(1), "codec": found_layers(1, bound=2**-3, bits_per_value=1.0)}
    state = {"params": params, "optimizer": tx.init(params)}
    needs = []

    def step(state, x):
        gradients = jax.grad(lambda p: loss(p["codec"], p["net"], x))(state["params"])
        _, optimizer = tx.update(gradients, state["optimizer"], state["params"])
        return {"params": state["params"], "optimizer": optimizer}, gradients["codec"].statistics.bits

    run = compress.transactional(step, window=3, donate=False)
    for scale, replays in ((1, 1), (16, 2), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2)):
        state, bits = run(state, batch(0, scale))
        needs.append(bits)
        assert run.replays == replays
        for capacity, need in zip(run.capacities[0], needs[-1] if scale > 1 else needs[0], strict=True):
            assert capacity >= 1.02 * need  # once the margin was taken
    for capacity, need in zip(run.capacities[0], needs[0], strict=True):
        assert capacity < 1.3 * need
    assert run.compiled == 3
    # A step changes nothing if the one before has overflowed.
    after, _, report = run.lower(state, batch(0)).compile()(state, jnp.asarray(True), batch(0))
    assert report["overflowed"]
    chex.assert_trees_all_equal(after, state)


def test_overflows_leave_no_trace():
    steps = 50
    random = {*np.random.default_rng(0).choice(steps - 2, 6, replace=False), steps - 2, steps - 1}
    want, want_outs, enough = trained(steps, None)
    assert enough.replays == 0
    for ahead in (False, True):
        got, outs, run = trained(steps, 0.5, force=lambda step: step in random, ahead=ahead)
        assert run.replays >= 8
        assert run.compiled < 10
        for a, b in zip(values(got), values(want), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(outs, want_outs)
        assert np.isfinite(values(got)[-1]).all()


def test_refuses():
    for options, message in (
        ({"interval": 0}, "interval must be an integer of at least 1, got 0"),
        ({"sigma": 0.0}, "sigma must be a positive finite number, got 0.0"),
        ({"coefficient": -1.0}, "coefficient must be a positive finite number, got -1.0"),
        ({"coarsest": 0}, "coarsest must be a positive finite number, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            compress.adaptive(optax.sgd(0.1), **options)
    with pytest.raises(
        TypeError, match=r"clip must be a gradient transformation or None, got 1.0: pass optax.clip_by_global_norm"
    ):
        compress.adaptive(optax.sgd(0.1), clip=1.0)
    with pytest.raises(TypeError, match="coarsest must be a positive finite number, got an array"):
        compress.adaptive(optax.sgd(0.1), coarsest=jnp.ones(3))
    with pytest.raises(TypeError, match="layers must be an integer of at least 0, got '3'"):
        Statistics.zeros("3", 1)
    with pytest.raises(ValueError, match=r"i must be the number of one of .* arrays, got 99"):
        found_layers().layer(99)
    tx = compress.adaptive(optax.sgd(0.1))
    with pytest.raises(ValueError, match="params must contain the Layers"):
        tx.init(weights())
    with pytest.raises(ValueError, match=r"params must contain '0/0/conv0', whose gradient .* they are \['w'\]"):
        tx.init({"w": jnp.zeros(3), "codec": found_layers()})
    with pytest.raises(ValueError, match=r"margin must be a finite number in \[1, inf\), got 0.5"):
        compress.transactional(lambda state: (state, None), margin=0.5)
    with pytest.raises(ValueError, match="window must be an integer of at least 1, got 0"):
        compress.transactional(lambda state: (state, None), window=0)
    with pytest.raises(ValueError, match="saving must be a number between 0 and 1, got 1"):
        compress.transactional(lambda state: (state, None), saving=1)
    with pytest.raises(ValueError, match="state must contain the Layers"):
        compress.transactional(lambda state: (state, None))({})
    with pytest.raises(ValueError, match=r"state must contain one state of memjax.compress.adaptive, got 0"):
        compress.transactional(lambda state: (state, None))({"codec": found_layers()})
