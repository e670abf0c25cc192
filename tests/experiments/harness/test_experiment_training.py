"""Training steps, whole small runs, their reports, and the errors that come before any training."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import memjax
from experiments import densenet264
from experiments.densenet264 import PRESETS, make_task
from experiments.harness import devices
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.classification import NO_LABEL, classification_loss
from experiments.harness.loop.step import eval_step, init_state, train_step
from experiments.harness.main import run
from experiments.harness.reports import memory
from experiments.harness.storage import records
from experiments.harness.storage.checkpoints import Checkpoints

TINY = ["--block-sizes", "1", "--image-size", "8", "--growth-rate", "2"]


def start(folder, *argv) -> int:
    flags = ["--runs-dir", str(folder), *argv]
    return run(PRESETS, make_task, description="", facts=densenet264.facts, argv=flags)


def tiny_task(folder, **changes):
    config = dataclasses.replace(
        PRESETS["cpu"], name="a", runs_dir=folder, block_sizes=(1,), growth_rate=2, image_size=8, **changes
    )
    return config, make_task(config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run of two epochs."""
    folder = tmp_path_factory.mktemp("runs")
    assert start(folder, "--name", "a", "--epochs", "2", *TINY) == 0
    return folder / "a"


def test_a_run_learns_and_leaves_its_records(finished):
    train = records.read(finished / "metrics.jsonl", "train")
    assert [record["step"] for record in train] == list(range(1, 2 * (1437 // 64) + 1))
    assert train[-1]["loss"] < 0.95 * train[0]["loss"]
    tests = records.read(finished / "metrics.jsonl", "test")
    assert [record["epoch"] for record in tests] == [1, 2]
    assert 0.2 < tests[-1]["top1"] <= tests[-1]["top5"] <= 1
    assert json.loads((finished / "config.json").read_text())["block_sizes"] == [1]
    compared = memory.load(finished / "memory.json")
    assert list(compared) == ['keep="features" (this run)', 'keep="all"']
    assert all((finished / name).stat().st_size > 5000 for name in ("curves.png", "memory.png"))


def test_report_only_rebuilds_tables_and_plots(finished, capsys):
    for name in ("curves.png", "memory.png"):
        (finished / name).unlink()
    before = (finished / "metrics.jsonl").read_bytes()
    assert start(finished.parent, "--name", "a", "--report-only") == 0
    out = capsys.readouterr().out
    assert "test accuracy, top1" in out
    assert 'keep="all"' in out
    assert all((finished / name).exists() for name in ("curves.png", "memory.png"))
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_has_nothing_left_to_resume(finished):
    before = (finished / "metrics.jsonl").read_bytes()
    assert start(finished.parent, "--name", "a", "--resume", "--no-compare") == 0
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--name", "a", *TINY), "holds a run already"),
        (("--name", "a", "--resume", "--growth-rate", "3"), "was made with --growth-rate 2, not 3"),
        (("--name", "b", "--batch-size", "20", *TINY), "--batch-size 20 does not divide over 8 devices"),
        (("--name", "b", "--batch-size", "64", "--accumulate", "3", *TINY), "must be a multiple of 24"),
        (("--name", "b", "--batch-size", "1600", *TINY), "more than the 1437 training examples"),
        (("--name", "b", "--growth-rate", "0"), "--growth-rate must be at least 1, got 0"),
        (("--name", "b", "--data", "folder"), "needs --data-dir"),
    ],
)
def test_errors_come_before_training_and_without_a_traceback(finished, capsys, argv, said):
    assert start(finished.parent, *argv) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Compiling" not in captured.out
    assert not (finished.parent / "b" / "config.json").exists()


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "a").write_text("a file where the run's folder should be")
    assert start(tmp_path, "--name", "a", *TINY) == 2
    assert f"cannot write {tmp_path / 'a'}" in capsys.readouterr().err


def test_a_run_that_diverges_says_so_and_saves_nothing_broken(tmp_path, capsys):
    assert start(tmp_path, "--name", "a", "--epochs", "1", "--learning-rate", "1e30", "--no-compare", *TINY) == 2
    assert "try a lower --learning-rate" in capsys.readouterr().err
    assert records.read(tmp_path / "a" / "metrics.jsonl", "test") == []


def losses_on(mesh, task, steps=4):
    """Training and test losses of a few steps on the devices of `mesh`."""
    shared = devices.replicated(mesh)
    rule = optax.sgd(0.1, momentum=0.9)
    state = jax.jit(lambda: init_state(task.make_model, rule), out_shardings=shared)()
    step = jax.jit(train_step(task.make_model, task.loss, rule, 1), out_shardings=shared)
    test = jax.jit(eval_step(task.make_model, task.test_loss))
    found = []
    for _ in range(steps):
        batch = devices.put(next(task.train_batches), devices.batch_sharding(mesh), task.batch)
        assert len(batch["image"].sharding.device_set) == mesh.size
        state, sums = step(state, batch)
        found += [float(sums["loss"]), float(test(state, batch)["loss"])]
    return found


def test_eight_devices_train_like_one(tmp_path):
    one, eight = (losses_on(devices.data_mesh(jax.devices()[:count]), tiny_task(tmp_path)[1]) for count in (1, 8))
    np.testing.assert_allclose(eight, one, rtol=2e-4)


class Plain(nnx.Module):
    """Without normalisation, so that micro-batches do not change the mathematics."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, images):
        return self.linear(images.reshape(images.shape[0], -1))


def test_images_of_another_size_are_resized():
    """Linearly: a ramp stays one, but for its ends."""
    ramp = np.broadcast_to(np.arange(0, 160, 10, dtype=np.uint8)[None, None, :, None], (2, 16, 16, 1))
    batch = {"image": jnp.asarray(ramp), "label": jnp.zeros(2, jnp.int32)}

    @jax.jit
    def resized(batch):
        seen = []
        model = lambda images: seen.append(images) or jnp.zeros((2, 3))
        for size in (16, 32):
            classification_loss(mean=(0.0,), std=(1.0,), label_smoothing=0.0, size=size)(model, batch)
        return seen

    seen = resized(batch)
    assert [images.shape for images in seen] == [(2, 16, 16, 1), (2, 32, 32, 1)]
    inner = np.asarray(seen[1])[:, :, 1:-1, 0] * 255
    np.testing.assert_allclose(inner, np.broadcast_to(np.arange(2.5, 150, 5), inner.shape), rtol=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_accumulated_gradients_are_those_of_the_whole_batch(label_smoothing):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 12).astype(np.int32)
    labels[:5] = NO_LABEL  # micro-batches with unequal counts
    batch = {"image": rng.integers(0, 255, (12, 4, 4, 1), np.uint8), "label": labels}
    loss = classification_loss(mean=(0.5,), std=(0.5,), label_smoothing=label_smoothing)
    rule = optax.sgd(0.5)

    def make_model():
        return Plain(nnx.Rngs(0))

    state = jax.jit(lambda: init_state(make_model, rule))()
    (whole, sums), (parts, part_sums) = (
        jax.jit(train_step(make_model, loss, rule, accumulate))(state, batch) for accumulate in (1, 3)
    )
    assert float(sums["count"]) == 7
    for a, b in zip(jax.tree.leaves((whole, sums)), jax.tree.leaves((parts, part_sums)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_loss_and_accuracies_against_numpy():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, 8)).astype(np.float32)
    labels = np.array([0, 3, 7, 2, NO_LABEL, 1], np.int32)
    batch = {"image": jnp.zeros((6, 2, 2, 1), jnp.uint8), "label": jnp.array(labels)}
    loss = classification_loss(mean=(0.0,), std=(1.0,), label_smoothing=0.0)
    sums = jax.jit(lambda batch: loss(lambda images: logits, batch))(batch)
    counted = labels != NO_LABEL
    wide = logits.astype(np.float64)[counted]
    own = wide[np.arange(5), labels[counted]]
    rank = (wide > own[:, None]).sum(-1)
    expected = {
        "loss": (np.log(np.exp(wide).sum(-1)) - own).sum(),
        "top1": (rank == 0).sum(),
        "top5": (rank < 5).sum(),
        "count": 5,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5)


def test_images_are_normalised_before_the_model():

    @jax.jit
    def mean_and_std(batch):
        seen = []

        def model(images):
            seen.extend([images.mean(), images.std()])
            return jnp.zeros((images.shape[0], 10))

        classification_loss(mean=(0.4,), std=(0.1,), label_smoothing=0.0)(model, batch)
        return seen

    images = np.random.default_rng(0).normal(0.4, 0.1, (8, 16, 16, 1)).clip(0, 1)
    batch = {"image": jnp.array(np.round(images * 255).astype(np.uint8)), "label": jnp.zeros(8, jnp.int32)}
    mean, std = mean_and_std(batch)
    assert abs(float(mean)) < 0.05
    assert abs(float(std) - 1) < 0.05


def test_memory_figures_do_not_depend_on_how_fast_the_program_is_compiled(tmp_path):
    _, task = tiny_task(tmp_path)
    rule = optax.sgd(0.1, momentum=0.9)
    step = jax.jit(train_step(task.make_model, task.loss, rule, 1), donate_argnums=0)
    state = jax.eval_shape(lambda: init_state(task.make_model, rule))
    quick = memory.measure(step, state, task.batch)
    assert quick.temp_bytes == memjax.measure(step, state, task.batch).temp_bytes


def test_this_runs_training_step_takes_less_memory(tmp_path):
    config, _ = tiny_task(tmp_path)
    config = dataclasses.replace(config, block_sizes=(8,), growth_rate=4, image_size=16)
    task = make_task(config)
    rule = optax.sgd(0.1, momentum=0.9)
    temp = {}
    for name, make_model in task.compare.items():
        step = train_step(make_model, task.loss, rule, 1)
        state = jax.eval_shape(lambda make_model=make_model: init_state(make_model, rule))
        temp[name] = memory.measure(step, state, task.batch).temp_bytes
    features, everything = temp.values()
    assert features < 0.3 * everything


def test_checkpoints_are_rotated_and_restore_everything(tmp_path):
    config, task = tiny_task(tmp_path, keep_checkpoints=2, dropout_rate=0.1)
    rule = optax.sgd(0.1, momentum=0.9)
    state = jax.jit(lambda: init_state(task.make_model, rule))()
    is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    step = jax.jit(lambda state: jax.tree.map(lambda a: a if is_key(a) else a + jnp.ones((), a.dtype), state))
    with Checkpoints(config, Console(quiet=True)) as checkpoints:
        for number in range(1, 4):
            state = step(state)
            next(task.train_batches)
            checkpoints.save(state, task.train_batches, number)
    kept = {path.name for path in (config.folder / "checkpoints").iterdir()}
    assert {"2", "3"} <= kept
    assert "1" not in kept
    expected_batch = next(task.train_batches)

    _, fresh = tiny_task(tmp_path)
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = memory.placed(jax.eval_shape(lambda: init_state(task.make_model, rule)), one_device)
    with Checkpoints(config, Console(quiet=True)) as again:
        restored, found_step = again.restore(like, fresh.train_batches)
    assert found_step == 3
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        if is_key(a):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(next(fresh.train_batches)["image"], expected_batch["image"])


@pytest.mark.smoke
def test_records_forget_later_steps_and_cut_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = records.Records(path)
    for step in range(5):
        log.append("train", step, loss=float(step))
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 5, "lo')
    assert [record["step"] for record in records.read(path)] == [0, 1, 2, 3, 4]
    records.keep_until(path, 2)
    assert [record["step"] for record in records.read(path, "train")] == [0, 1, 2]
    assert records.read(path, "test") == []


def test_config_is_checked_against_the_checkpoint_itself(tmp_path):
    config, task = tiny_task(tmp_path)
    rule = optax.sgd(0.1)
    with Checkpoints(config, Console(quiet=True)) as checkpoints:
        checkpoints.save(jax.jit(lambda: init_state(task.make_model, rule))(), task.train_batches, 1)
    other = Checkpoints(dataclasses.replace(config, growth_rate=3), Console(quiet=True))
    with other, pytest.raises(ExperimentError, match="--growth-rate 2, not 3"):
        other.check()
