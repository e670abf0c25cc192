"""Trainings side by side: each is the training that it would be alone; a tiny run that is stopped and goes on; bad flags."""

import functools
import json
import signal

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
from tests.experiments.short_text import read_short_text

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
    "0.003",  # two steps
    "--bits",  # none, beside the sigma
]


def start(module, folder, *flags) -> int:
    # optax's AdamW raises a float to the power of its integer count.
    with jax.numpy_dtype_promotion("standard"):
        argv = ["--runs-dir", str(folder), "--name", "a", "--test-batches", "1", *flags]
        return run(module.PRESETS, module.make_task, description="", argv=argv, extra_report=module.paired_report)


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    read_short_text(monkeypatch, gpt)


def test_members_are_the_trainings_that_they_would_be_alone():
    blocks, clip, kinds, seeds = BlocksConfig(16, 1, 2), 0.1, (PLAIN, 8), 2
    make = lambda seed: GPT(blocks, vocabulary=256, length=16, rngs=nnx.Rngs(seed))
    text = np.random.default_rng(0).integers(256, size=(3, 8, 17), dtype=np.uint8)
    inner = optax.adamw(optax.cosine_decay_schedule(1e-2, 3))
    with jax.numpy_dtype_promotion("standard"):
        together = members_optimizer(inner, clip, seeds * len(kinds))
        make_members = lambda: Members(make, kinds, seeds, first=5)
        state = jax.jit(functools.partial(init_state, make_members, together))()
        step = jax.jit(train_step(make_members, members_loss(gpt.loss, together=False), together, 1))
        alone = optax.chain(optax.clip_by_global_norm(clip), inner)
        for batch in text:
            state, sums = step(state, {"text": batch})
        for i, bits in enumerate(kinds):
            one = lambda j, bits=bits: with_bits(make(jax.random.key(5 + j)), bits)
            step_alone = jax.jit(train_step(functools.partial(one, 0), gpt.loss, alone, 1))
            start_alone = jax.jit(lambda j, one=one: init_state(functools.partial(one, j), alone))
            for j in range(seeds):
                own = start_alone(j)
                for batch in text:
                    own, own_sums = step_alone(own, {"text": batch[4 * j : 4 * j + 4]})
                name = f"plain, {j}" if bits == PLAIN else f"{bits} bits, {j}"
                np.testing.assert_allclose(sums[name], own_sums["loss"], rtol=1e-4)
                got, wanted = map(jax.tree.leaves, jax.device_get((state.params["models"][i], own.params)))
                for a, b in zip(got, wanted, strict=True):
                    np.testing.assert_allclose(a[j], b, atol=2e-3)


def test_a_run_goes_on_where_it_was_and_is_analysed(tmp_path, capsys, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)  # a run that is stopped leaves the default
    with monkeypatch.context() as stopped:
        stopped.setattr(analysis, "errors", interrupted)
        status = start(gpt, tmp_path, *TINY, "--seeds", "2", "--sigma", "0.03", "--choose-every", "4")
    signal.signal(signal.SIGINT, handler)
    assert status == 130
    choices = lambda: [json.loads(text) for text in json.loads((tmp_path / "a" / "bits.json").read_text())]
    (first,) = choices()
    assert first["step"] == 0
    assert first["sigma"] <= 0.03

    monkeypatch.setattr(config, "_ANALYSED", 2)
    monkeypatch.setattr(analysis, "_DRAWS", 2)
    assert start(gpt, tmp_path, "--resume", "--epochs", "0.0071") == 0
    said = capsys.readouterr().out
    assert "Resuming at step 2" in said
    assert choices()[0] == first
    assert [choice["step"] for choice in choices()] == [0, 4]
    found = json.loads((tmp_path / "a" / "analysis.json").read_text())
    assert {row["bits"] for row in found["errors"]} == {0.03}
    plain, codes = (
        next(row["bytes"] for row in found["bytes"] if row["kind"] == kind) for kind in ("plain", "sigma 0.03")
    )
    assert 0 < codes <= plain
    assert "predicted within 20%" in said
    for name in ("differences", "errors", "bytes"):
        assert (tmp_path / "a" / f"{name}.png").stat().st_size > 1000
    for flag, made, given in (("--sigma", "0.03", "0.02"), ("--seeds", "2", "3")):
        assert start(gpt, tmp_path, "--resume", flag, given) == 2
        assert f"was made with {flag} {made}, not {given}" in capsys.readouterr().err


class Stack(nnx.Module):
    """A model of two blocks: with fewer, compression changes no gradient."""

    def __init__(self, rngs):
        block = lambda: nnx.Sequential(nnx.Linear(8, 64, rngs=rngs), jnp.sin, nnx.Linear(64, 8, rngs=rngs))
        self.blocks = nnx.List([block() for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_errors_of_gradients_are_those_predicted():
    batches = np.random.default_rng(0).normal(size=(4, 256, 8)).astype(np.float32)
    loss = lambda model, batch: {"loss": jnp.sum(model(batch["x"]) ** 2), "count": jnp.float32(256)}
    make = lambda: Stack(nnx.Rngs(0))
    params = nnx.state(make(), nnx.Param)
    rows = analysis.errors(make, params, loss, (PLAIN, 4, 3), [{"x": jnp.asarray(batch)} for batch in batches])
    assert [row["bits"] for row in rows] == 4 * [4, 3]
    for row in rows:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.25)
    by_bits = {bits: [row["measured"] for row in rows if row["bits"] == bits] for bits in (4, 3)}
    assert max(by_bits[4]) < min(by_bits[3]) < 0.3


def test_vit_sees_patches():
    @jax.jit
    def seen_and_logits(images):
        model = ViT(BlocksConfig(16, 1, 2), classes=3, image_size=16, patch=8, rngs=nnx.Rngs(0))
        seen = []
        model.patches = lambda x: seen.append(x) or jnp.zeros((*x.shape[:2], 16))
        return seen, model(images)

    images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
    (seen,), logits = jax.device_get(seen_and_logits(images))
    assert logits.shape == (2, 3)
    np.testing.assert_array_equal(seen[1, 2].reshape(8, 8, 3), images[1, 8:, :8])


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
