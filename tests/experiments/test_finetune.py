"""Trainings in float32 and in few bytes a parameter: a tiny run, its bytes, its resumption; bad flags."""

import json

import jax
import pytest

from experiments import finetune
from experiments.harness.main import run
from experiments.harness.storage import records
from tests.experiments.short_text import read_short_text

SIZES = {
    "layers": 1,
    "dim": 64,
    "heads": 2,
    "length": 16,
    "batch-size": 8,
    "epochs": 0.01,
    "test-batches": 1,
    "seeds": 2,
}
TINY = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def start(folder, *flags) -> int:
    # optax's AdamW raises a float to the power of its integer count.
    with jax.numpy_dtype_promotion("standard"):
        argv = ["--runs-dir", str(folder), "--name", "a", *flags]
        return run(
            finetune.PRESETS, finetune.make_task, description="", argv=argv, extra_report=finetune.finetune_report
        )


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    read_short_text(monkeypatch, finetune)


def test_few_bytes_train_as_float32_does(tmp_path, capsys):
    assert start(tmp_path, "--preset", "cpu", *TINY) == 0
    folder = tmp_path / "a"
    nbytes = json.loads((folder / "bytes.json").read_text())
    plain, few = (nbytes[kind] for kind in ("float32", "split masters, 8 bits"))
    assert plain["weights"] == 4
    assert plain["state"] == pytest.approx(8, abs=0.01)
    assert few["weights"] == 2
    # The other halves, two moments in codes, and what is too small for codes: norms.
    assert few["state"] == pytest.approx(2 + 2 * (1 + 1 / 32), abs=0.05)
    train = records.read(folder / "metrics.jsonl", "train")
    assert len(train) > 2
    for seed in range(2):
        first, last = ([record[f"{kind}, {seed}"] for kind in nbytes] for record in (train[0], train[-1]))
        assert first[0] == pytest.approx(first[1], rel=1e-5)
        assert last[0] == pytest.approx(last[1], rel=0.01)
        assert last[0] < first[0]
        assert last[0] != last[1]
    assert (folder / "finetune.png").exists()
    capsys.readouterr()
    assert start(tmp_path, "--report-only") == 0
    assert "Test losses, and bytes a parameter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bits", "5"], "--bits must be 8, 4 or 32, got 5"),
        (["--heads", "3"], "--heads must be even"),
        (["--optimizer", "sgd"], "--optimizer must be adamw here"),
        (["--seeds", "0"], "--seeds must be at least 1"),
    ],
)
def test_bad_flags_say_what_to_change(tmp_path, capsys, flags, message):
    assert start(tmp_path, "--preset", "cpu", *flags) == 2
    assert message in capsys.readouterr().err
