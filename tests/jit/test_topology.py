"""`memjax.jit` of types on devices that are not there: those of a topology."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import _jax

import memjax
from memjax._jit.cache import name_of_program
from memjax._program import traced
from tests.jit.steps import STEPS, Step, within


def types(step: Step, devices: list) -> list:
    """The types of the arguments of a step, each whole on all of these devices."""
    sharding = NamedSharding(Mesh(np.array(devices), ("d",)), P())
    return [*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), step.args)]


@pytest.fixture(scope="module")
def described() -> list:
    """Two CPUs that are not there. JAX lowers programs for them. XLA compiles for described GPUs and TPUs alone."""
    return _jax.get_topology_for_devices(jax.devices()[:2])._make_compile_only_devices()


def test_a_call_with_types_compiles_nothing(count):
    step = STEPS["layers"]()
    jitted = memjax.jit(step.f, budget=within(0.6, step), **step.options)
    count.clear()
    with pytest.raises(TypeError, match=r"arguments must be arrays, got the type .*: plan, trace, lower"):
        jitted(*types(step, jax.devices()[:1]))
    assert not count


def test_a_device_that_is_not_there_tells_no_limit(described):
    step = STEPS["layers"]()
    with pytest.raises(ValueError, match=r"budget must be bytes for devices that are not there.*got 'device': pass"):
        memjax.jit(step.f, **step.options).plan(*types(step, described))


def test_explain_and_measure_ask_the_devices_of_types(described):
    step = STEPS["layers"]()
    assert traced("explain", step.f, tuple(types(step, described)), {}).device in described


def test_programs_for_devices_that_are_not_there_are_not_kept(described):
    step = STEPS["layers"]()
    name = lambda devices: name_of_program(jax.jit(step.f).lower(*types(step, devices)), devices[0])
    assert name(described) is None
    assert name(jax.devices()[:2]) is not None
