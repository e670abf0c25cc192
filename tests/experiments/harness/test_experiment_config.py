"""Command line of the experiments: presets, saved configurations, and what is refused."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.densenet264 import PRESETS, DenseNetConfig
from experiments.harness import config as configuration
from experiments.harness.config import check_resumable, parse
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.optimizer import clipping, learning_rate, optimizer


def parsed(*argv) -> DenseNetConfig:
    return parse(PRESETS, description="", argv=argv)


def test_preset_sets_defaults_and_flags_override_them():
    config = parsed("--preset", "gpu", "--batch-size", "32")
    assert (config.growth_rate, config.image_size, config.dtype) == (48, 224, "bfloat16")
    assert config.batch_size == 32


def test_auto_preset_is_that_of_the_machine():
    assert parsed().preset == "cpu"
    assert parsed().name.startswith("densenet264-")


def test_densenet264_is_the_default_network():
    assert parsed().block_sizes == (6, 12, 64, 48)


@pytest.mark.parametrize(
    "argv", [("--grwoth-rate", "4"), ("--keep", "everything"), ("--epochs", "many"), ("--preset", "tpu")]
)
def test_unknown_flags_and_values_exit(argv, capsys):
    with pytest.raises(SystemExit):
        parsed(*argv)
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--growth-rate", "0"), "--growth-rate must be at least 1, got 0"),
        (("--block-sizes", "2", "0"), "--block-sizes"),
        (("--batch-size", "0"), "--batch-size must be positive, got 0"),
        (("--epochs", "-1"), "--epochs"),
        (("--milestones", "0.7", "0.3"), "--milestones"),
        (("--momentum", "1"), "--momentum"),
        (("--warmup", "1"), r"--warmup must be in \[0, 1\), got 1"),
        (("--clip", "0"), "--clip must be positive, got 0"),
        (("--dropout-rate", "1"), "--dropout-rate"),
        (("--checkpoint-every", "0"), "--checkpoint-every"),
        (("--image-size", "7"), "--image-size must be at least 8"),
        (("--skip-broken",), "--skip-broken and --data-dir are for --data folder"),
        (("--data-dir", "x"), "--skip-broken and --data-dir are for --data folder"),
        (("--name", "../a"), "--name must be the name of a folder in --runs-dir, got '../a'"),
        (("--seed", "2147483648"), r"--seed must be less than 2\*\*31"),
        (("--epochs", "nan"), "--epochs must be a finite number, got nan"),
        (("--learning-rate", "inf"), "--learning-rate must be a finite number, got inf"),
        (("--image-size", "100000000"), "--image-size must be at most 4096"),
    ],
)
def test_values_that_cannot_be_run_with_are_named(argv, named):
    with pytest.raises(ExperimentError, match=named):
        parsed(*argv)


def test_saved_configuration_loads_equal(tmp_path):
    config = parsed(
        "--runs-dir",
        str(tmp_path),
        "--name",
        "a",
        "--data",
        "folder",
        "--data-dir",
        "x/y",
        "--milestones",
        "0.1",
        "0.9",
    )
    config.folder.mkdir()
    configuration.save(config, config.folder / "config.json")
    assert configuration.load(DenseNetConfig, config.folder) == config


def test_resume_starts_from_the_saved_configuration_of_the_newest_run(tmp_path):
    for age, name in enumerate(("densenet264-old", "densenet264-new", "another-newest")):
        config = parsed("--runs-dir", str(tmp_path), "--name", name, "--batch-size", str(8 + age))
        config.folder.mkdir()
        path = config.folder / "config.json"
        configuration.save(config, path)
        os.utime(path, (age, age))
    resumed = parsed("--runs-dir", str(tmp_path), "--resume", "--epochs", "3")
    assert (resumed.name, resumed.batch_size, resumed.epochs, resumed.resume) == (
        "densenet264-new",
        9,
        3,
        True,
    )
    with pytest.raises(ExperimentError, match="--preset gpu"):
        parsed("--runs-dir", str(tmp_path), "--resume", "--preset", "gpu")


@pytest.mark.parametrize("flag", ["--resume", "--report-only"])
def test_nothing_to_resume_or_report(tmp_path, flag):
    with pytest.raises(ExperimentError, match="nothing to"):
        parsed(flag, "--runs-dir", str(tmp_path))
    with pytest.raises(ExperimentError, match=r"config\.json"):
        parsed(flag, "--runs-dir", str(tmp_path), "--name", "absent")


def test_a_checkpoint_of_another_architecture_is_refused():
    config = parsed()
    saved = json.loads(json.dumps(configuration.as_dict(config)))
    check_resumable(saved, config, Path("here"))
    check_resumable(saved, dataclasses.replace(config, keep="all", epochs=1), Path("here"))  # no shape changes
    with pytest.raises(ExperimentError, match=r"here was made with --growth-rate 4, not 5"):
        check_resumable(saved, dataclasses.replace(config, growth_rate=5), Path("here"))


def test_step_and_cosine_schedules():
    config = dataclasses.replace(PRESETS["cpu"], schedule="step", learning_rate=0.1, milestones=(0.5, 0.75))
    step = learning_rate(config, 100)
    np.testing.assert_allclose(
        [step(s) for s in (0, 49, 51, 74, 76, 99)], [0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3], rtol=1e-6
    )
    cosine = learning_rate(dataclasses.replace(config, schedule="cosine"), 100)
    np.testing.assert_allclose([cosine(s) for s in (0, 50, 100)], [0.1, 0.05, 0], atol=1e-8)
    warm = learning_rate(dataclasses.replace(config, warmup=0.1), 100)
    np.testing.assert_allclose([warm(s) for s in (0, 4, 9, 10, 51)], [0.01, 0.05, 0.1, 0.1, 0.01], rtol=1e-6)


def test_optimizer_is_nesterov_momentum_with_an_l2_penalty():
    config = dataclasses.replace(PRESETS["cpu"], schedule="step", milestones=(), learning_rate=0.1, weight_decay=0.01)
    rule = optimizer(config, 10)
    weight, velocity = 1.0, 0.0
    params = np.float32(weight)
    state = rule.init(params)
    for gradient in (0.5, -0.25, 1.0):
        updates, state = rule.update(np.float32(gradient), state, params)
        params = optax.apply_updates(params, updates)
        penalised = gradient + 0.01 * weight
        velocity = 0.9 * velocity + penalised
        weight -= 0.1 * (penalised + 0.9 * velocity)
        np.testing.assert_allclose(params, weight, rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_clipping_comes_first(name):
    config = dataclasses.replace(PRESETS["cpu"], optimizer=name, clip=0.5, weight_decay=0.01)
    params, large, small = jnp.array([1.0, -2.0]), jnp.array([3.0, 4.0]), jnp.array([0.1, -0.2])

    @jax.numpy_dtype_promotion("standard")  # optax's Adam
    def second_update(rule, *gradients):
        """A first one of Adam's has the same size whatever the gradient's."""
        state = rule.init(params)
        for one in gradients:
            updates, state = rule.update(one, state, params)
        return updates

    free_rule = optimizer(config, 10, clipped=True)
    want = second_update(free_rule, large / 10, small)
    np.testing.assert_allclose(second_update(optimizer(config, 10), large, small), want, rtol=1e-6)
    assert not np.allclose(second_update(free_rule, large, small), want, rtol=1e-2)
    free = dataclasses.replace(config, clip=None)
    assert (clipping(free) is None) == (name == "sgd")
