"""`benchmarks.transformer` at a tiny size: its rows, and the tables made of them."""

import jax
import pytest

from benchmarks import markdown, record, transformer, transformer_tables


@pytest.fixture
def standard_promotion():
    """JAX's attention mixes bfloat16 with float32. The benchmark compiles in threads, which no context manager reaches."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_rows_and_tables(standard_promotion, tmp_path, monkeypatch):
    sizes = {"dim": 64, "hidden": 256, "heads": 4, "kv_heads": 2, "vocabulary": 256, "sequences": 2, "tokens": 256}
    config = transformer.Config(layers=2, budgets=(), rounds=1, cases=("products kept", "ChannelQuantized(8)"), **sizes)
    rows = transformer.measure(config)
    assert not [row["error"] for row in rows if "error" in row]
    plain, products, compressed, rounding = rows
    assert products["temp_mib"] < plain["temp_mib"]
    # Checkpoints round as the plain layers do; codes of eight bits round more.
    assert 0 == plain["gradient_error"] <= products["gradient_error"] < rounding["gradient_error"] < 0.1
    assert products["gradient_error"] < compressed["gradient_error"] < 0.1
    record.save("transformer", rows, tmp_path)
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    names, compression = (make() for make in transformer_tables.TABLES.values())
    assert "| `jax.checkpoint`, products kept |" in names
    assert "| `compressed`, `ChannelQuantized(8)` |" in compression
