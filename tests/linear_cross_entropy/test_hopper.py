"""The kernels for Hopper GPUs, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax._linear_cross_entropy import check
from memjax._linear_cross_entropy.options import head_columns, matmul
from tests.linear_cross_entropy.oracle import example, plain, relative_error, to_float64

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="their interpreter came with JAX 0.11")

# Neither tokens nor columns fill their tiles, and the last chunk is smaller than the others.
TOKENS, DIM, CLASSES, CHUNK = 261, 256, 320, 256


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from memjax._linear_cross_entropy.gpu import hopper, mosaic_matmul

    def add_input_gradient(dx, d, operands, start, options):
        """What the interpreter cannot: adding in memory."""
        w = head_columns(operands.w, start, d.shape[1], options)
        dx[...] += matmul("nv,vd->nd", d, w, options, jnp.float32)

    monkeypatch.setattr(hopper, "_add_input_gradient", add_input_gradient)
    monkeypatch.setattr(check, "_no_mosaic", lambda dtype: None)
    monkeypatch.setattr(mosaic_matmul, "multiprocessors", lambda: 4)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


@pytest.mark.parametrize(
    ("layout", "dtype", "options"),
    [
        ("vd", jnp.bfloat16, {}),
        ("dv", jnp.bfloat16, {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "logit_scale": 0.7}),
    ],
)
def test_values_and_gradients(layout, dtype, options):
    x, w, labels = example(0, TOKENS, DIM, CLASSES, dtype=dtype, layout=layout)
    arrays = {"x": x, "w": w}
    if options:
        arrays["bias"] = jnp.linspace(-1, 1, CLASSES).astype(dtype)
        arrays["weights"] = jnp.linspace(0, 2, TOKENS)

    def ours(**arrays):
        return memjax.linear_cross_entropy(
            **arrays, labels=labels, layout=layout, implementation="recompute/mosaic", chunk=CHUNK, return_aux=True,
            **options,
        )  # fmt: skip

    (value, aux), grads = jax.value_and_grad(lambda arrays: ours(**arrays), has_aux=True)(arrays)
    _, expected_aux = memjax.linear_cross_entropy(
        **arrays, labels=labels, layout=layout, implementation="full", return_aux=True, **options
    )
    with jax.enable_x64(True):
        exact = to_float64(arrays)
        expected, expected_grads = jax.value_and_grad(
            lambda arrays: plain(**arrays, labels=labels, layout=layout, **options)
        )(exact)
    assert relative_error(value, expected) < 1e-6
    for actual, reference in zip(aux, expected_aux, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=1e-5)
    for name, grad in grads.items():
        assert grad.dtype == arrays[name].dtype
        assert relative_error(grad, expected_grads[name]) < 3e-3, name
