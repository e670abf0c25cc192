"""The byte-level LSTM: its text, its loss, a small run, and bad flags."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import bptt
from experiments.bptt import PRESETS, facts, make_task
from experiments.data import text as text_source
from experiments.data.text import standard_library, train_windows, windows
from experiments.harness import main as harness
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.comparison import Comparison
from experiments.harness.main import run
from experiments.harness.reports import memory
from experiments.harness.storage import records
from experiments.models.lstm import ByteLSTM
from tests.experiments.short_text import read_short_text

TINY = ["--length", "64", "--features", "8", "--batch-size", "64", "--epochs", "0.4", "--budget", "256KiB"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of 60 files of one line each, some in places that are left out."""
    folder = tmp_path_factory.mktemp("library")
    for i in range(60):
        path = folder / ("test" if i % 10 == 9 else "package") / f"file{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"line of file {i}, number {i * i}\n")
    return folder, standard_library(folder)


def start(folder, *argv) -> int:
    # optax's AdamW raises a float to the power of its integer count.
    with jax.numpy_dtype_promotion("standard"):
        return run(PRESETS, make_task, description="", facts=facts, argv=["--runs-dir", str(folder), *argv])


def test_splits_share_no_file_and_leave_tests_out(text):
    _, found = text
    lines = [set(bytes(split).split(b"\0")) - {b""} for split in (found.train, found.test)]
    assert not lines[0] & lines[1]
    assert len(lines[0] | lines[1]) == 54
    assert not any(b"file 9," in line for line in lines[0] | lines[1])


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="too few Python files"):
        standard_library(tmp_path)


def test_training_windows_are_pieces_of_the_text_and_resume_where_they_were(text):
    _, found = text
    make = lambda: train_windows(found, length=7, batch_size=4, seed=3)
    batches = make()
    for _ in range(5):
        batch = next(batches)["text"]
        assert batch.shape == (4, 8)
        assert batch.dtype == np.uint8
        assert all(bytes(row) in bytes(found.train) for row in batch)
    position = batches.get_state()
    expected = [next(batches)["text"] for _ in range(3)]
    again = make()
    again.set_state(position)
    for batch in expected:
        np.testing.assert_array_equal(next(again)["text"], batch)


def test_test_windows_go_through_the_text_once(text):
    _, found = text
    rows = np.concatenate([b["text"] for b in text_source.test_windows(found, length=5, batch_size=2)])
    assert len(rows) == windows(found.test, 5) // 2 * 2
    assert bytes(rows[:, :-1].ravel()) == bytes(found.test[: 5 * len(rows)])
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])  # the byte to predict begins the next window
    with pytest.raises(ExperimentError, match="batch-size 1000"):
        next(text_source.test_windows(found, length=5, batch_size=1000))


def test_budget_changes_neither_loss_nor_gradient():
    text = np.random.default_rng(0).integers(256, size=(3, 30), dtype=np.uint8)
    found = []
    for budget in (None, "16KiB"):
        make = lambda budget=budget: nnx.split(ByteLSTM(4, budget=budget, rngs=nnx.Rngs(0)))
        graph, _ = nnx.eval_shape(make)
        loss = lambda params, graph=graph: jnp.sum(nnx.merge(graph, params)(jnp.asarray(text))[0])
        found.append(jax.jit(lambda make=make, loss=loss: jax.value_and_grad(loss)(make()[1]))())
    for plain, saving in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(saving, plain, rtol=2e-5, atol=1e-6)
    assert found[0][0] / (3 * 29) == pytest.approx(np.log(256), rel=0.1)


def test_a_run_learns_and_keeps_to_its_budget(tmp_path, capsys, monkeypatch):
    """What it is compared with is compiled after the training, as on GPUs."""
    afterwards = lambda config, make_task, begins: Comparison(config, make_task, begins=False)
    monkeypatch.setattr(harness, "Comparison", afterwards)
    read_short_text(monkeypatch, bptt)
    assert start(tmp_path, "--name", "a", *TINY) == 0
    train = records.read(tmp_path / "a" / "metrics.jsonl", "train")
    assert train[-1]["loss"] < train[0]["loss"]
    found = list(memory.load(tmp_path / "a" / "memory.json").values())
    assert found[0]["temp_bytes"] < 0.7 * found[1]["temp_bytes"]
    assert "test bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--budget", "1B"], "--budget: "), (["--length", "0"], "--length must be"), (["--features", "0"], "--features")],
)
def test_bad_flags_are_errors_that_name_them(tmp_path, capsys, flags, message):
    assert start(tmp_path, *TINY, *flags) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        start(tmp_path, "--lenght", "5")
