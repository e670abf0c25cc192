"""`--devices`: plans for GPUs that are not there."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from memjax._commands import run
from memjax._commands.devices import Gpus, known, placed
from memjax._commands.factory import CommandError, made
from memjax._core.program import costs

FACTORIES = """
import jax
import jax.numpy as jnp


def step(w, x):
    loss = lambda w: jnp.mean(jnp.tanh(x @ w) ** 2)
    return w - jax.grad(loss)(w)


def plain():
    return step, (jnp.ones((256, 256)), jnp.ones((4096, 256)))


def split(devices):
    mesh = jax.make_mesh((len(devices),), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
    on = lambda *spec: jax.NamedSharding(mesh, jax.P(*spec))
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 256), (4096, 256)))
    return jax.jit(step, donate_argnums=0), (w.update(sharding=on()), x.update(sharding=on("data")))


def optional(devices=()):
    return step, (len(devices), 1)


def coded():
    import memjax, optax

    tx = memjax.compress.stochastic_round(memjax.compressed(optax.adamw(1e-3)))
    weights = jax.ShapeDtypeStruct((2**14, 2**10), jnp.bfloat16)

    def step(weights, state):
        updates, state = tx.update(jax.grad(lambda w: jnp.sum(w.astype(jnp.float32)))(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    return jax.jit(step, donate_argnums=(0, 1)), (weights, jax.eval_shape(tx.init, weights))


def stated(of=None, weights=None):
    import optax

    tx = optax.adamw(1e-3)
    layer = lambda x, w: x + jnp.tanh(x @ w)
    of = of or (lambda x, w: jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0])

    def step(weights, state, x):
        gradients = jax.grad(lambda w: jnp.mean(of(x, w) ** 2))(weights)
        updates, state = tx.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    typed = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    weights = weights or typed(6, 1024, 1024)
    return jax.jit(step, donate_argnums=(0, 1)), (weights, jax.eval_shape(tx.init, weights), typed(1024, 1024))


def unrolled():
    import functools

    of = lambda x, w: functools.reduce(lambda x, w: x + jnp.tanh(x @ w), w, x)
    return stated(of, [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 6)


def loss():
    import memjax

    def step(head, x, labels):
        loss = lambda head: memjax.linear_cross_entropy(x, head, labels, implementation="recompute/mosaic")
        return head - jax.grad(loss)(head)

    head, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2**15, 1024), (4096, 1024)))
    return jax.jit(step, donate_argnums=0), (head, x, jax.ShapeDtypeStruct((4096,), jnp.int32))
"""
HAS_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
FOUR = jax.devices()[:4]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "ahead.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("ahead", None)


def test_times_of_every_gpu_are_known():
    for name, text in known().items():
        (kind,) = [line.split('"')[1] for line in text.splitlines() if line.startswith("device_description_str")]
        gpu = type("Gpu", (), {"device_kind": kind, "platform": "gpu"})
        assert costs.device(gpu).kind == name.partition("-")[0]
        assert text.count("{") == text.count("}")


def test_arguments_are_types_on_the_only_gpu():
    gpus = Gpus("1xCPU", [jax.devices()[3]], 0, 1.0)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    args = (
        {"model": model, "again": model},
        jax.device_put(jnp.ones(2), FOUR[1]),
        3,
        jnp.asarray(1.0),
        jax.random.key(0),
    )
    models, x, number, weak, key = placed(args, gpus)
    assert number == 3
    assert models["model"] is models["again"]
    assert isinstance(models["model"].kernel.get_value(), jax.ShapeDtypeStruct)
    for array in (models["model"].kernel.get_value(), x, weak, key):
        assert array.sharding.device_set == {jax.devices()[3]}
    assert (x.weak_type, weak.weak_type, key.dtype) == (False, True, args[-1].dtype)
    assert isinstance(model.kernel.get_value(), jax.Array), "the user's model stays as it is"


def on(devices, *spec):
    mesh = jax.make_mesh((len(devices),), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
    return jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(*spec)))


def test_shardings_over_several_gpus_stay():
    x, y = placed((on(FOUR, "data"), jnp.ones(2)), Gpus("4xCPU", FOUR, 0, 1.0))
    assert x.sharding == on(FOUR, "data").sharding
    assert y.sharding is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (lambda: (jnp.ones(2),), "the arguments have none"),
        (lambda: (on(FOUR), jax.device_put(jnp.ones(2), jax.devices()[5])), "an argument float32[2] is on"),
        (lambda: (on(FOUR), on(jax.devices()[2:6])), "an argument float32[8] is on"),
        (
            lambda: (
                jax.ShapeDtypeStruct(
                    (8,), jnp.float32, sharding=jax.NamedSharding(jax.sharding.AbstractMesh((4,), ("x",)), jax.P())
                ),
            ),
            "the arguments have none",
        ),
    ],
)
def test_several_gpus_need_shardings_over_them(args, said):
    with pytest.raises(CommandError, match="--devices 4xCPU needs arguments with shardings over these GPUs") as error:
        placed(args(), Gpus("4xCPU", FOUR, 0, 1.0))
    assert said in str(error.value)
    assert "def FACTORY(devices)" in str(error.value)


def test_arguments_on_the_host_are_refused():
    on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    with pytest.raises(
        CommandError, match="--devices 1xCPU needs arguments on the GPUs: JAX tells no memory of the host"
    ):
        placed((jnp.ones(2), jax.device_put(jnp.ones(2), on_host)), Gpus("1xCPU", FOUR[:1], 0, 1.0))


def test_a_factory_may_take_the_devices():
    assert made("ahead:split", FOUR)[1][1].sharding.device_set == {*FOUR}
    assert made("ahead:split")[1][1].sharding.device_set == {*jax.devices()}
    assert [made("ahead:optional", devices)[1][0] for devices in (FOUR, None)] == [4, 0]


@pytest.mark.parametrize(
    ("asked", "share", "said"),
    [
        ("8xH1000", "", "--devices must be a number and a GPU, such as 8xH100, got '8xH1000': known are A100"),
        ("H100", "", "--devices must be a number and a GPU, such as 8xH100, got 'H100'"),
        ("0xH100", "", "--devices must be a number and a GPU"),
        ("1xh100", "95", "XLA_CLIENT_MEM_FRACTION must be above 0 and at most 1, got '95'"),
        pytest.param(
            *("1xh100", "", "needs the CUDA plugin of JAX, which is not installed: pip install 'memjax[gpu]'"),
            marks=pytest.mark.skipif(HAS_PLUGIN, reason="it is installed"),
        ),
    ],
)
def test_a_wrong_flag_is_answered_in_one_line(asked, share, said, monkeypatch, capsys):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", share)
    assert run(["fit", "ahead:plain", "--devices", asked]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's CUDA plugin, and no GPU")
@pytest.mark.parametrize(
    ("command", "count", "kind", "held"),
    [
        # Weights, batch and new weights.
        ("ahead:plain --devices 1xA100-40GB", 1, "NVIDIA A100-SXM4-40GB", (256 + 4096 + 256) * 256 * 4),
        # Weights, which new ones replace, and a fourth of the batch.
        ("ahead:split --devices 4xb200", 4, "NVIDIA B200", (256 + 1024) * 256 * 4),
    ],
)
def test_plans_for_gpus_that_are_not_there(command, count, kind, held, folder):
    found = fitted(command, folder)
    assert (found["devices"]["count"], found["devices"]["kind"]) == (count, kind)
    assert found["budget"] == int(0.75 * found["devices"]["nbytes"])
    activations = (4096 if count == 1 else 1024) * 256 * 4
    assert held < found["nbytes"] <= held + 3 * activations + 2**20


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's CUDA plugin, and no GPU")
def test_kernels_are_compiled_for_gpus_that_are_not_there(folder):
    """The update of codes has no moments in float32."""
    parameters = 2**24
    nbytes = fitted("ahead:coded --devices 1xh200", folder)["nbytes"]
    assert 4 * parameters < nbytes < (4.07 + 2) * parameters + 2**20, "weights, codes, gradients"


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's CUDA plugin, and no GPU")
def test_the_loss_has_its_kernels_for_gpus_that_are_not_there(folder):
    """Which no other machine takes by that name."""
    head, logits = 2**15 * 1024 * 2, 4096 * 2**15 * 2
    assert head < fitted("ahead:loss --devices 1xh100", folder)["nbytes"] < 3 * head + logits


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's CUDA plugin, and no GPU")
@pytest.mark.parametrize("layers", ["stated", "unrolled"])
def test_state_lies_on_the_host_of_a_gpu_that_is_not_there(layers, folder):
    """One layer's on the device. Beside weights, state and a batch that would leave room for two arrays more."""
    array = 1024 * 1024 * 4
    weights, budget = 6 * array, (3 * 6 + 1 + 2) * array
    found = fitted(f"ahead:{layers} --devices 1xh100 --budget {budget}B --allow recompute offload", folder)
    assert found["nbytes"] <= budget
    assert array <= found["plan"]["host_nbytes"] <= 2 * weights


def fitted(command, folder):
    environ = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    line = [sys.executable, "-m", "memjax", "fit", *command.split(), "--json"]
    done = subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
