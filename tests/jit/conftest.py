import jax
import pytest


@pytest.fixture(autouse=True)
def _standard_promotion():
    """optax promotes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def count(monkeypatch):
    """A list with an entry for each program that was compiled ahead."""
    found = []
    compiling = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: found.append(1) or compiling(*a, **k))
    return found
