"""Programs that are traced for a device that is not there."""

import jax
import jax.numpy as jnp
import optax
import pytest

import memjax
from memjax import compress
from memjax._core.platforms import capability_for_triton, traced_for_arguments
from memjax._linear_cross_entropy import check
from memjax.remat import DenseSpec
from memjax.remat._dense import triton

CALL = "__gpu$xla.gpu.triton"


class CompileOnlyPyClient:
    """As JAX calls that of a device that is not there."""


class Gpu:
    client = CompileOnlyPyClient()
    device_kind, platform, compute_capability = "NVIDIA H100 80GB HBM3", "gpu", "9.0"


class OnDevices:
    """What has a sharding over devices."""

    def __init__(self, *devices):
        self.sharding, self.device_set = self, {*devices}


@traced_for_arguments
def traced(step, args, _):
    return step.trace(*args)


@traced_for_arguments
def called(f, _):
    return f()


@pytest.fixture
def step():
    """An update of weights, and its arguments."""
    tx = compress.stochastic_round(memjax.compressed(optax.adamw(1e-3)))
    weights = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    return jax.jit(tx.update), (weights, jax.eval_shape(tx.init, weights), weights)


def kernels(traced):
    return traced.lower(lowering_platforms=("cuda",)).as_text().count(CALL)


def test_it_has_kernels_of_that_device(step):
    with jax.numpy_dtype_promotion("standard"):
        there, here = traced(*step, OnDevices(Gpu())), traced(*step, OnDevices(jax.devices()[0]))
        assert (kernels(there), kernels(here)) == (1, 0)


def test_programs_of_several_devices_have_none(step):
    with jax.numpy_dtype_promotion("standard"):
        assert kernels(traced(*step, OnDevices(Gpu(), Gpu()))) == 0


def test_a_code_has_the_kernels_of_that_device():
    step, x = jax.jit(compress.ErrorBounded(0.1).encode), jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    there, here = traced(step, (x,), OnDevices(Gpu())), traced(step, (x,), OnDevices(jax.devices()[0]))
    assert (kernels(there), kernels(here)) == (1, 0)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels run there")
def test_the_loss_and_dense_blocks_choose_kernels_by_that_device(monkeypatch):
    for module in (check, triton):
        monkeypatch.setattr(module, "no_jax_triton", lambda: None)
    a100 = type("A100", (Gpu,), {"device_kind": "NVIDIA A100-SXM4-40GB", "compute_capability": "8.0"})
    of_loss = lambda: check.implementation(None, "mean", jnp.bfloat16)[1]
    of_block = lambda: triton.why_not(DenseSpec(16, 16, 2), jnp.bfloat16)
    on = [OnDevices(Gpu()), OnDevices(a100()), OnDevices(jax.devices()[0])]
    mosaic = ("mosaic",) if jax.__version_info__ >= (0, 11) else ()
    assert [called(of_loss, one) for one in on] == [(*mosaic, "triton", "jnp"), ("triton", "jnp"), ("jnp",)]
    assert [called(of_block, one) for one in on] == [None, None, "it needs an NVIDIA GPU"]
    assert [called(capability_for_triton, one) for one in on] == [90, 80, None]
