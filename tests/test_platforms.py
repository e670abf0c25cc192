"""Programs that are traced for a device that is not there."""

import jax
import jax.numpy as jnp
import optax
import pytest

import memjax
from memjax import compress
from memjax._core.platforms import traced_for_arguments

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
