"""The error model: what is predicted of gradients' errors, and what they are."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax import compress, compressed
from tests.compress.codecs.round_trip import normal
from tests.compress.networks import conv, loss_of
from tests.compress.uniform_error import inject_error


def down(x, w):
    return lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def network(params, x):
    """Two layers, then two branches that read the same array, as residual networks have them."""
    x = jax.nn.relu(conv(x, params["first"]))
    x = jax.nn.relu(conv(x, params["second"]))
    return conv(x, params["third"])[:, ::2, ::2] + down(x, params["shortcut"])


def setting():
    sizes = {"first": (3, 3), "second": (3, 3), "third": (3, 3), "shortcut": (1, 1)}
    params = {name: normal(*size, 16, 16, seed=i) / 10 for i, (name, size) in enumerate(sizes.items())}
    return params, normal(16, 16, 16, 16, seed=4)


def test_sigma_is_as_predicted_and_errors_are_normal():
    params, x = setting()
    bound = 0.05
    by_layers = lambda codec, params, x: loss_of(compressed(network, codec, where="conv", inputs=True))(params, x)
    layers = compress.layers(by_layers, params, x)

    @jax.jit
    def exact(params, x):
        raw = jax.tree.map(jnp.zeros_like, layers)  # without a bound everything is stored as it is
        return jax.grad(by_layers, (0, 1))(raw, params, x)

    @jax.jit
    def with_errors(seed):
        f = inject_error(network, bound, seed=seed)
        return jax.grad(loss_of(f))(params, x)

    found, gradients = exact(params, x)
    samples = [with_errors(seed) for seed in range(24)]
    half_width = np.full(len(layers.names), bound, np.float32)
    predicted = np.asarray(jax.jit(compress.predicted_sigma)(found.statistics, half_width))
    names = {tuple(name.split("/")[-1] for name in own): i for i, own in enumerate(layers.weights)}
    assert {frozenset(own) for own in names} == {
        frozenset({"first"}),
        frozenset({"second"}),
        frozenset({"third", "shortcut"}),
    }
    for own, i in names.items():
        for j, name in enumerate(own):
            errors = np.stack([np.asarray(sample[name], np.float64) - gradients[name] for sample in samples])
            assert 0.8 < predicted[i, j] / errors.std() < 1.2
            # Pairs of channels have deviations of their own, so that all together are a mixture of normal distributions.
            own_sigma = errors.std((0, 1, 2), keepdims=True)
            assert abs(np.mean(np.abs(errors) < own_sigma) - 0.682) < 0.03
