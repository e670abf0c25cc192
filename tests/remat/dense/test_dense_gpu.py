"""The fused kernels against the plain version, on a GPU: error against float64 no worse than plain bfloat16's."""

import jax.numpy as jnp
import numpy as np
import pytest

from memjax.remat import DenseSpec, dense_block
from tests.remat.dense.dense_cases import random_block, run_block, total_error

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
def test_kernels_are_as_accurate_as_plain_bfloat16(x64, spec, shape, keep):
    """Over several seeds, and their median: a sign that flips before a ReLU makes one error many times another.

    Against plain bfloat16 as written, and against what the compiler makes of it: that keeps the 1x1 convolution's output in
    float32, in twice the memory, and so rounds once less.
    """
    ratios = {"as written": [], "as compiled": []}
    for seed in range(7):
        exact = run_block(spec, random_block(spec, shape, seed=seed, dtype=jnp.float64), keep="all")
        case = random_block(spec, shape, seed=seed)

        def errors(exact=exact, case=case, **how):
            result = run_block(spec, case, dtype=jnp.bfloat16, **how)
            return np.array([total_error(result[part], exact[part]) for part in exact])

        fused = errors(keep=keep, implementation="triton")
        for name, found in ratios.items():
            found.append((fused + 1e-7) / (errors(keep="all", as_written=name == "as written") + 1e-7))
    medians = {name: np.median(found, 0) for name, found in ratios.items()}
    print(list(exact), medians)
    assert (medians["as written"] <= 1.1).all()
    assert (medians["as compiled"] <= 1.2).all()


def test_nan_reaches_the_output():
    spec = DenseSpec(16, 16, 2)
    params, running, x, _ = random_block(spec, (1, 8, 8), seed=2)
    x = x.at[0, 3, 3, 5].set(jnp.nan).astype(jnp.bfloat16)
    features, _ = dense_block(spec, params, running, x, implementation="triton")
    assert np.isnan(np.asarray(features[..., 16:], np.float32)).all()
