"""Random dense blocks, and errors of results against a reference, for the tests of dense blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from memjax.remat import DenseParams, DenseSpec, DenseStatistics, dense_block


def random_block(spec: DenseSpec, shape, *, seed: int, dtype=jnp.float32):
    """Parameters, running statistics, input and cotangent of no special structure, every layer's output of order one."""
    rng = np.random.default_rng(seed)
    fan_in = np.concatenate([np.full(spec.channels(i), spec.channels(i)) for i in range(spec.num_layers)])
    normal = lambda *size: rng.normal(size=size)
    affine = lambda *size: (1 + 0.3 * normal(*size), 0.3 * normal(*size))
    rows, layers, k = spec.rows, spec.num_layers, spec.growth_rate
    scale1, bias1 = affine(rows)
    mean2 = var2 = None
    if spec.bottleneck is None:
        kernel2 = normal(rows, 3, 3, k) / np.sqrt(4.5 * fan_in)[:, None, None, None]
        params = DenseParams(scale1, bias1, None, None, None, kernel2)
    else:
        kernel1 = normal(rows, spec.width) * np.sqrt(2 / fan_in)[:, None]
        kernel2 = normal(layers, 3, 3, spec.width, k) / np.sqrt(4.5 * spec.width)
        params = DenseParams(scale1, bias1, kernel1, *affine(layers, spec.width), kernel2)
        mean2, var2 = 0.3 * normal(layers, spec.width), 1 + 0.3 * rng.random((layers, spec.width))
    consumed = spec.out_features - k
    running = DenseStatistics(0.3 * normal(consumed), 1 + 0.3 * rng.random(consumed), mean2, var2)
    x, cotangent = normal(*shape, spec.in_features), normal(*shape, spec.out_features)
    return jax.device_put(jax.tree.map(lambda a: np.asarray(a, dtype), (params, running, x, cotangent)))


def relative_errors(result, reference) -> dict[str, float]:
    """Norm of the difference over norm of the reference, leaf by leaf, in float64."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(reference)]
    errors = {}
    for path, value, exact in zip(paths, jax.tree.leaves(result), jax.tree.leaves(reference), strict=True):
        value, exact = np.asarray(value, np.float64), np.asarray(exact, np.float64)
        errors[path] = float(np.linalg.norm(value - exact) / max(np.linalg.norm(exact), 1e-30))
    return errors


def total_error(result, exact) -> float:
    """Norm of the difference over norm of the reference, a tree seen as one vector, in float64."""
    flat = lambda tree: np.concatenate([np.asarray(a, np.float64).ravel() for a in jax.tree.leaves(tree)])
    return float(np.linalg.norm(flat(result) - flat(exact)) / np.linalg.norm(flat(exact)))


def run_block(spec, case, *, keep, dtype=None, implementation=None, as_written=False):
    """Features, statistics and gradients of a random block, with the cotangent of `case`.

    With `as_written` the compiler may not leave out roundings to a narrow type between two operations.
    """
    params, running, x, cotangent = case
    x = x if dtype is None else x.astype(dtype)
    return _block_runner(spec, keep, implementation, as_written)(params, running, x, cotangent)


@functools.cache
def _block_runner(spec, keep, implementation, as_written):
    key = jax.random.key(0)

    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False} if as_written else None)
    def run(params, running, x, cotangent):
        def loss(params, x):
            features, statistics = dense_block(
                spec, params, running, x, keep=keep, dropout_key=key, implementation=implementation
            )
            return jnp.sum(features.astype(cotangent.dtype) * cotangent), (features, statistics)

        (_, (features, statistics)), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return {"features": features, "statistics": statistics, "d_params": gradients[0], "dx": gradients[1]}

    return run
