"""The four classifiers, the photographs, and a run of compressed training from the command line to its figures."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from experiments.compressed_training import PRESETS, CompressedConfig, _model, make_task
from experiments.compression.analysis import _normalised
from experiments.compression.observed import layers_of
from experiments.compression.report import extra_report
from experiments.data.photographs import photographs
from experiments.harness import devices
from experiments.harness.config import parse
from experiments.harness.loop.classification import classification_loss
from experiments.harness.loop.training import Trainer
from experiments.harness.main import run
from experiments.harness.storage import records
from experiments.models.classifiers import MODELS
from memjax._residuals import differentiated

PUBLISHED = {"alexnet": 60_965_224, "vgg16": 138_357_544, "resnet18": 11_689_512, "resnet50": 25_557_032}


@pytest.fixture(autouse=True)
def two_devices(monkeypatch):
    mesh = devices.data_mesh(jax.devices()[:2])
    monkeypatch.setattr(devices, "data_mesh", lambda: mesh)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.smoke] * (name == "alexnet")) for name in MODELS]
)
def test_networks_are_those_published(name):
    net = nnx.eval_shape(lambda: MODELS[name](1000, rngs=nnx.Rngs(0)))
    assert sum(p.size for p in jax.tree.leaves(nnx.state(net, nnx.Param))) == PUBLISHED[name]

    def logits(images):
        return MODELS[name](10, image_size=64, width=0.25, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(images)

    with jax.numpy_dtype_promotion("standard"):  # batch norms add bfloat16 to float32
        found = jax.eval_shape(logits, jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32))
    assert (found.shape, found.dtype) == ((2, 10), jnp.float32)


def _jaxpr_of_loss(config: CompressedConfig, is_compressed: bool):
    """And of its gradient, for eight images: the half of one of two devices."""
    graph, *parts = nnx.split(nnx.eval_shape(lambda: _model(config, 16, is_compressed)), nnx.Param, ...)
    loss = classification_loss(mean=(0.5,) * 3, std=(0.25,) * 3, label_smoothing=0.0, size=config.image_size)
    image, label = jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.uint8), jax.ShapeDtypeStruct((8,), jnp.int32)

    def of_parts(params, others, image, label):
        net = nnx.merge(graph, params, others)
        net.train()
        return loss(net, {"image": image, "label": label})["loss"]

    jaxpr = jax.make_jaxpr(of_parts)(*parts, image, label)
    return differentiated(jaxpr, [True] * len(jaxpr.out_avals))


@pytest.mark.parametrize("size", [8, 96])
def test_photographs_are_apart(size):
    data = photographs(size)
    rng = np.random.default_rng(0)
    assert len(data.classes) == 16
    assert {int(data.test_example(item)["label"]) for item in data.test} == set(range(16))
    seen = {}  # by photograph: of each pixel whether training shows it
    for photo in range(16):
        # Every pixel its own value: which are shown?
        height, width = data.train_example._photos[photo].shape[:2]
        numbers = np.arange(height * width).reshape(height, width)
        pixels = np.stack([numbers // 2**16, numbers // 2**8 % 2**8, numbers % 2**8], -1).astype(np.uint8)
        data.train_example._photos[photo] = pixels
        seen[photo] = np.zeros(height * width, bool)
    number = lambda image: (image.astype(int) * [2**16, 2**8, 1]).sum(-1)
    for item in data.train[::4]:
        example = data.train_example(item, rng)
        assert example["image"].shape == (size, size, 3)
        seen[int(example["label"])][number(example["image"])] = True
    assert all(shown.any() for shown in seen.values())
    for item in data.test:
        example = data.test_example(item)
        assert example["image"].shape == (size, size, 3)
        assert not seen[int(example["label"])][number(example["image"])].any()


def command(runs, *flags):
    model = ["--model", "alexnet", "--width", "0.25", "--batch-size", "16", "--epochs", "0.024", "--schedule", "step"]
    argv = ["--preset", "cpu", "--runs-dir", str(runs), "--name", "run", *model, *flags]
    return run(PRESETS, make_task, description="", argv=argv, extra_report=extra_report)


def test_a_run_with_an_overflow_reports_and_can_be_restored(tmp_path, capsys):
    assert command(tmp_path, "--bits-per-value", "1") == 0
    folder = tmp_path / "run"
    train = records.read(folder / "metrics.jsonl", "train")
    assert [record["step"] for record in train] == [1, 2, 3]
    assert train[-1]["replays"] >= 1
    assert train[0]["bounds"] != train[-1]["bounds"]
    assert len(train[0]["bits"]) == len(train[0]["bounds"]) == 4
    values, pixels = np.array([7 * 7 * 24, 3 * 3 * 64, 3 * 3 * 96, 3 * 3 * 96]), 64 * 64 * 3
    bits = values @ train[0]["bits"] + 8 * pixels
    np.testing.assert_allclose(train[0]["ratio"], 32 * (values.sum() + pixels) / bits, rtol=1e-3)
    assert all(3 < record["ratio"] < 64 for record in train)
    for name in ("curves", "ratio", "layers", "errors"):
        assert (folder / f"{name}.png").stat().st_size > 5000
    rows = json.loads((folder / "analysis.json").read_text())["rows"]
    # Not the first one, whose images are kept as bytes.
    assert [row["layer"] for row in rows] == [f"conv{i}/conv" for i in range(2, 6)]
    for row in rows:
        assert 0.5 < row["predicted"] / row["measured"] < 2
    assert "saved activations" in capsys.readouterr().out
    compared = ["--runs-dir", str(tmp_path), "--name", "run", "--report-only", "--baseline", "run"]
    assert run(PRESETS, make_task, description="", argv=compared, extra_report=extra_report) == 0
    assert capsys.readouterr().out.count("sigma 0.01") == 2
    for more in ([*compared, "none"], ["--runs-dir", str(tmp_path), "--name", "new", "--baseline", "none"]):
        assert run(PRESETS, make_task, description="", argv=more, extra_report=extra_report) == 2
        assert "--baseline" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()

    config = parse(PRESETS, description="", argv=["--resume", "--runs-dir", str(tmp_path), "--name", "run"])
    with Trainer(config, make_task(config), Console(quiet=True)) as trainer:
        restored, step = trainer._restored()
    assert step == 3
    np.testing.assert_array_equal(layers_of(restored).bound, np.float32(train[-1]["bounds"]))
    assert int(restored.optimizer.step) == 3


def test_errors_in_units_of_their_deviations():
    """Those whose deviations are rounding errors are left out."""
    rng = np.random.default_rng(0)
    variance = rng.uniform(0.01, 100, (3, 3, 40, 50)).astype(np.float32)
    error = rng.normal(size=variance.shape) * np.sqrt(variance) * 1e-6
    variance[..., :5, :] = rng.uniform(-1, 1, (3, 3, 5, 50)) ** 9 * 1e-9
    error[..., :5, :] = 1e-9
    normalised = _normalised(error, variance)
    assert normalised.size == 3 * 3 * 35 * 50
    np.testing.assert_allclose(np.mean(np.abs(normalised) < 1), 0.683, atol=0.01)
    np.testing.assert_allclose(np.std(normalised), 1, rtol=1e-3)


def test_refuses(tmp_path, capsys):
    for flags, message in (
        (["--crop-size", "128"], "--crop-size must be from 8 to 96, got 128"),
        (["--crop-size", "96"], "--crop-size 96 must be at most --image-size 64"),
        (["--sigma", "0"], "--sigma must be positive"),
        (["--bits-per-value", "-1"], "--bits-per-value must be positive"),
    ):
        assert command(tmp_path, *flags) == 2
        assert message in capsys.readouterr().err
