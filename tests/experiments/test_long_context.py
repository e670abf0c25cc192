"""The experiment with long sequences: a tiny run that is stopped and goes on, and bad flags."""

import json

import jax
import pytest

from experiments import long_context
from experiments.context import comparison
from tests.experiments.short_text import read_short_text

SMALLEST = ["--layers", "1", "--length", "64", "--batch-size", "8", "--epochs", "0.0001", "--recipe", "checkpoint"]
TINY = [*SMALLEST, "--compare-lengths", "64", "--memory-limit", "4MiB", "--longest", "64"]


def start(folder, *flags) -> int:
    # optax's AdamW raises a float to the power of its integer count.
    with jax.numpy_dtype_promotion("standard"):
        return long_context.main([*TINY, "--runs-dir", str(folder), "--name", "a", *flags])


def test_a_run_measures_what_it_has_not_measured_yet(tmp_path, capsys, monkeypatch):
    read_short_text(monkeypatch, long_context, comparison)
    assert start(tmp_path, "--compare", "slots=1", "--longest", "0") == 0
    path = tmp_path / "a" / "lengths.json"
    (first,) = json.loads(path.read_text())
    assert first["recipe"] == "slots=1"
    assert first["kib"] > first["formula"] > 0 < first["seconds"]
    assert start(tmp_path, "--resume", "--compare", "slots=1", "bits=4", "--longest", "64") == 0
    rows = json.loads(path.read_text())
    assert rows[0] == first
    assert [(row["kind"], row["recipe"]) for row in rows[1:]] == [
        ("longest", "slots=1"), ("length", "bits=4"), ("longest", "bits=4"), ("error", "bits=4"),
    ]  # fmt: skip
    assert all(row["length"] == 64 for row in rows)
    assert "longest" in capsys.readouterr().out
    assert (tmp_path / "a" / "lengths.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipe", "tiled+slots"], "--recipe: a recipe must be words of plain, checkpoint, slots=N"),
        (["--compare", "groups=3"], "--compare: groups must be a divisor of the 2 heads of keys, got 3"),
        (["--recipe", "offload"], "--recipe: offload needs a device with memory of its own"),
        (["--recipe", "budget=2XB"], "--recipe: budget must be"),
        (["--recipe", "budget=1B"], "--recipe: budget is 1 B, but the least possible is"),
        (["--memory-limit", "many"], "--memory-limit: memory_limit must be"),
        (["--length", "0"], "--length and --compare-lengths must be at least 1"),
        (["--layers", "-1"], "--layers must be at least 0, got -1"),
        (["--compare-lengths"], "--compare-lengths must have at least one length"),
    ],
)
def test_bad_flags_are_errors_that_name_them(tmp_path, capsys, flags, message):
    assert start(tmp_path, *flags) == 2
    assert message in capsys.readouterr().err
