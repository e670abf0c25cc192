"""The Transformer trained with and without its logits: one small run of everything, and bad flags."""

import json

import jax
import numpy as np
import pytest

from experiments import cross_entropy
from experiments.cross_entropy import main
from experiments.harness.storage import records
from tests.experiments.short_text import read_short_text

TINY = [
    *("--length", "16", "--dim", "8", "--layers", "1", "--heads", "2", "--batch-size", "64", "--epochs", "0.1"),
    *("--log-every", "1", "--loss-chunk", "64", "--figure-tokens", "32", "--figure-vocabulary", "64"),
    *("--figure-dims", "4", "--figure-chunks", "1", "4"),
]


def start(folder, *argv):
    # optax's AdamW raises a float to the power of its integer count.
    with jax.numpy_dtype_promotion("standard"):
        return main(["--runs-dir", str(folder), *TINY, *argv])


def test_both_losses_train_alike(tmp_path, capsys, monkeypatch):
    read_short_text(monkeypatch, cross_entropy)
    assert start(tmp_path, "--name", "a") == 0
    ours, plain = (
        [row["loss"] for row in records.read(tmp_path / name / "metrics.jsonl", "train")] for name in ("a", "a-plain")
    )
    assert len(ours) > 5
    assert ours[-1] < ours[0]
    np.testing.assert_allclose(ours, plain, atol=1e-4)
    rows = json.loads((tmp_path / "a" / "chunks.json").read_text())
    assert [row["chunks"] for row in rows] == [0, 1, 4]
    assert {"losses.png", "chunks.png"} <= {path.name for path in (tmp_path / "a").iterdir()}
    assert "Largest difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--loss-chunk", "0"], "--loss-chunk must be"), (["--heads", "3"], "--"), (["--figure-chunks", "0"], "--figure")],
)
def test_bad_flags_are_errors_that_name_them(tmp_path, capsys, flags, message):
    assert start(tmp_path, *flags) == 2
    assert message in capsys.readouterr().err
