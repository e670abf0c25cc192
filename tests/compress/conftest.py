"""How the compression tests compile."""

import jax
import pytest

_FLAG = "jax_disable_most_optimizations"


@pytest.fixture(autouse=True)
def quick_compile():
    """Machine code as it comes: optimising that of the codecs takes longer than anything a test runs."""
    before = jax.config.read(_FLAG)
    jax.config.update(_FLAG, True)
    yield
    jax.config.update(_FLAG, before)


@pytest.fixture
def optimised(quick_compile):
    """Machine code as users get it."""
    jax.config.update(_FLAG, False)
