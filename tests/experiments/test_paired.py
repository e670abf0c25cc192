"""Trainings side by side: each is the training that it would be alone; a tiny run that is stopped and goes on; bad flags."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments import gpt, vit
from experiments.harness.loop.step import init_state, train_step
from experiments.harness.main import run
from experiments.models.blocks import GPT, BlocksConfig, ViT
from experiments.paired import analysis, config
from experiments.paired.members import PLAIN, Members, members_loss, members_optimizer, with_bits

TINY = [
    "--layers",
    "1",
    "--dim",
    "16",
    "--heads",
    "2",
    "--length",
    "16",
    "--batch-size",
    "8",
    "--epochs",
    "0.0001",
    "--bits",
    "4",
]


def start(module, folder, *flags) -> int:
    # optax's AdamW raises a float to the power of its integer count.
    with jax.numpy_dtype_promotion("standard"):
        argv = ["--runs-dir", str(folder), "--name", "a", "--test-batches", "1", *flags]
        return run(module.PRESETS, module.make_task, description="", argv=argv, extra_report=module.paired_report)


def test_members_are_the_trainings_that_they_would_be_alone():
    blocks, clip, kinds, seeds = BlocksConfig(16, 1, 2), 0.1, (PLAIN, 8), 2
    make = lambda seed: GPT(blocks, vocabulary=256, length=16, rngs=nnx.Rngs(seed))
    text = jax.random.randint(jax.random.key(0), (3, 8, 17), 0, 256).astype(jnp.uint8)
    inner = optax.adamw(optax.cosine_decay_schedule(1e-2, 3))
    with jax.numpy_dtype_promotion("standard"):
        together = members_optimizer(inner, clip, seeds * len(kinds))
        make_members = lambda: Members(make, kinds, seeds, first=5)
        state = init_state(make_members, together)
        step = jax.jit(train_step(make_members, members_loss(gpt.loss, together=False), together, 1))
        alone = optax.chain(optax.clip_by_global_norm(clip), inner)
        for batch in text:
            state, sums = step(state, {"text": batch})
        for i, bits in enumerate(kinds):
            one = lambda j, bits=bits: with_bits(make(jax.random.key(5 + j)), bits)
            step_alone = jax.jit(train_step(functools.partial(one, 0), gpt.loss, alone, 1))
            for j in range(seeds):
                own = init_state(functools.partial(one, j), alone)
                for batch in text:
                    own, own_sums = step_alone(own, {"text": batch[4 * j : 4 * j + 4]})
                name = f"plain, {j}" if bits == PLAIN else f"{bits} bits, {j}"
                np.testing.assert_allclose(sums[name], own_sums["loss"], rtol=1e-4)
                got, wanted = (jax.tree.leaves(params) for params in (state.params["models"][i], own.params))
                for a, b in zip(got, wanted, strict=True):
                    np.testing.assert_allclose(a[j], b, atol=2e-3)


def test_a_run_is_analysed_and_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(config, "_ANALYSED", 2)
    monkeypatch.setattr(analysis, "_DRAWS", 2)
    assert start(gpt, tmp_path, *TINY, "--seeds", "2", "--sigma", "0.03", "--choose-every", "3") == 0
    found = json.loads((tmp_path / "a" / "analysis.json").read_text())
    assert {row["bits"] for row in found["errors"]} == {4, 0.03}
    choices = lambda: [json.loads(text) for text in json.loads((tmp_path / "a" / "bits.json").read_text())]
    before = choices()
    assert [choice["step"] for choice in before] == list(range(0, 3 * len(before), 3))
    assert all(choice["sigma"] <= 0.03 for choice in before)
    assert all(row["measured"] >= 0 < row["predicted"] for row in found["errors"])
    plain, codes = (next(row["bytes"] for row in found["bytes"] if row["kind"] == kind) for kind in ("plain", "4 bits"))
    assert 0 < codes <= plain
    assert "predicted within 20%" in capsys.readouterr().out
    for name in ("differences", "errors", "bytes"):
        assert (tmp_path / "a" / f"{name}.png").stat().st_size > 1000
    assert start(gpt, tmp_path, "--resume", "--epochs", "0.0002") == 0
    assert "Resuming at step" in capsys.readouterr().out
    assert choices()[: len(before)] == before
    assert len(choices()) > len(before)
    assert start(gpt, tmp_path, "--resume", "--sigma", "0.02") == 2
    assert "was made with --sigma 0.03, not 0.02" in capsys.readouterr().err
    assert start(gpt, tmp_path, "--resume", "--seeds", "3") == 2
    assert "was made with --seeds 2, not 3" in capsys.readouterr().err


def test_vit_sees_patches():
    model = ViT(BlocksConfig(16, 1, 2), classes=3, image_size=16, patch=8, rngs=nnx.Rngs(0))
    seen = []
    model.patches = lambda x: seen.append(x) or jnp.zeros((*x.shape[:2], 16))
    images = jax.random.normal(jax.random.key(0), (2, 16, 16, 3))
    assert model(images).shape == (2, 3)
    np.testing.assert_array_equal(seen[0][1, 2].reshape(8, 8, 3), images[1, 8:, :8])


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        (gpt, ["--bits", "5"], "--bits must be of 8, 6, 4 and 3, got 5"),
        (gpt, ["--bits", "8", "8"], "--bits must differ from each other, got 8 8"),
        (gpt, ["--sigma", "2"], "--sigma must be between 0 and 1, got 2"),
        (gpt, ["--choose-every", "0"], "--choose-every must be at least 1, got 0"),
        (gpt, ["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (gpt, ["--heads", "5"], "--dim must be a multiple of heads = 5, got 96"),
        (gpt, ["--optimizer", "sgd"], "--optimizer must be adamw here, got sgd"),
        (gpt, ["--length", "0"], "--length must be at least 1, got 0"),
        (vit, ["--image-size", "200"], "--image-size must be from 8 to 96, got 200"),
        (vit, ["--patch", "7"], "--patch must be a divisor of --image-size 64, got 7"),
    ],
)
def test_bad_flags_are_errors_that_name_them(tmp_path, capsys, module, flags, message):
    assert start(module, tmp_path, *flags) == 2
    assert message in capsys.readouterr().err
