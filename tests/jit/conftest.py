import jax
import pytest


@pytest.fixture(autouse=True)
def _standard_promotion():
    """optax promotes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield
