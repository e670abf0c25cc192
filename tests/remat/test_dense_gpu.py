"""The fused kernels against the plain version, on a GPU: error against float32 no worse than plain bfloat16's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.remat import DenseSpec, dense_block
from tests.remat.dense_cases import random_block, relative_errors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("keep", ["convolutions", "features"])
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (DenseSpec(96, 48, 6), (4, 14, 14)),
        (DenseSpec(24, 16, 5), (3, 7, 5)),  # pixels that fill no tile
        (DenseSpec(64, 32, 9, use_running_average=True), (1, 9, 9)),
        (DenseSpec(16, 8, 3), (8, 112, 112)),  # many pixels: the other tiling
        (DenseSpec(128, 64, 4, dropout_rate=0.2), (2, 8, 8)),
    ],
)
def test_kernels_are_as_accurate_as_plain_bfloat16(spec, shape, keep):
    params, running, x, cotangent = random_block(spec, shape, seed=1)
    key = jax.random.key(0)

    def run(dtype, **options):
        def loss(params, x):
            features, statistics = dense_block(spec, params, running, x, dropout_key=key, **options)
            return jnp.sum(features.astype(jnp.float32) * cotangent), (features, statistics)

        grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        with jax.default_matmul_precision("highest"):
            return jax.tree.map(lambda a: np.asarray(a, np.float64), grad(params, x.astype(dtype)))

    exact = run(jnp.float32, keep="all")
    plain = relative_errors(run(jnp.bfloat16, keep="all"), exact)
    fused = relative_errors(run(jnp.bfloat16, keep=keep, implementation="triton"), exact)
    for name, error in fused.items():
        assert error <= 1.1 * plain[name] + 1e-4, (name, error, plain[name])


def test_nan_reaches_the_output():
    spec = DenseSpec(16, 16, 2)
    params, running, x, _ = random_block(spec, (1, 8, 8), seed=2)
    x = x.at[0, 3, 3, 5].set(jnp.nan).astype(jnp.bfloat16)
    features, _ = dense_block(spec, params, running, x, implementation="triton")
    assert np.isnan(np.asarray(features[..., 16:], np.float32)).all()
