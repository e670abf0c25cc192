"""What `explain` takes, and how it refuses the rest."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import memjax
from memjax._core.program.scopes import scopes

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def loss(w, x):
    return jnp.mean(jnp.sin(x @ w))


W = jax.ShapeDtypeStruct((32, 32), jnp.float32)


@pytest.mark.smoke
def test_losses_gradients_and_steps_keep_the_same():
    step = jax.jit(lambda w, x: w - jax.grad(loss)(w, x), donate_argnums=0)
    rows = [memjax.explain(f, W, X).rows for f in (loss, jax.jit(loss), jax.value_and_grad(loss), step)]
    kept = [[(row.bytes, row.producer, row.shape) for row in some] for some in rows]
    assert kept[0] == kept[1] == kept[2] == kept[3] == [(64 * 32 * 4, "cos", (64, 32))]


def test_what_is_data_is_not_differentiated():
    """A CTC loss reads floats of the batch in every step of its loop: its gradient with respect to these is not what trains."""

    def ctc(params, batch):
        logits = jnp.tanh(batch["x"] @ params["w"])
        return optax.ctc_loss(logits, batch["padding"], batch["labels"], batch["label_padding"]).mean()

    shapes = {"x": (2, 50, 8), "padding": (2, 50), "label_padding": (2, 10)}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch["labels"] = jax.ShapeDtypeStruct((2, 10), jnp.int32)
    params = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    explanation, gradient = memjax.explain(ctc, params, batch), jax.value_and_grad(ctc)
    assert explanation.residual_bytes == memjax.measure(gradient, params, batch).residual_bytes
    assert explanation.notes == ("differentiated with respect to argument 0, and not 1: argnums chooses",)
    both = memjax.explain(ctc, params, batch, argnums=(0, -1))
    assert both.residual_bytes == memjax.measure(ctc, params, batch).residual_bytes > explanation.residual_bytes
    assert not both.notes
    tokens = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert not memjax.explain(lambda table, tokens: (table[tokens] ** 2).sum(), W, tokens).notes
    with pytest.raises(ValueError, match=r"argnums must be positions among 2 arguments, got 2"):
        memjax.explain(ctc, params, batch, argnums=2)
    with pytest.raises(ValueError, match="argnums=0 has no floats to differentiate"):
        memjax.explain(lambda tokens, x: x[tokens].sum(), jax.ShapeDtypeStruct((3,), jnp.int32), jnp.ones(3))


def test_of_nnx_modules_parameters_are_differentiated():
    class Scaled(nnx.Module):
        def __init__(self):
            self.w, self.scale = nnx.Param(jnp.ones((32, 32))), nnx.BatchStat(jnp.ones(32))

        def __call__(self, x):
            return jnp.sin(x @ self.w[...]) * self.scale[...]

    explanation = memjax.explain(lambda model, x: model(x).sum(), Scaled(), X)
    assert (
        {"cos"} <= {row.producer for row in explanation.rows} <= {"cos", "broadcast_in_dim"}
    )  # no sine, for the scale's


def test_auxiliary_results_are_not_differentiated():
    explanation = memjax.explain(lambda w, x: (loss(w, x), jnp.exp(w)), W, X)
    assert [row.producer for row in explanation.rows] == ["cos"]


def test_what_is_offloaded_has_rows_of_its_own():
    layer = memjax.remat.checkpoint(
        lambda w, x: jnp.sin(checkpoint_name(jnp.sin(x @ w), "hidden")), policy=memjax.remat.policies.offload("hidden")
    )

    def two(w, x):
        return jnp.mean(layer(w, layer(w, x)))

    explanation, measured = memjax.explain(two, W, X), memjax.measure(two, W, X)
    assert explanation.offloaded_bytes == measured.offloaded_bytes == 2 * 64 * 32 * 4
    assert sum(row.bytes for row in explanation.offloaded) == explanation.offloaded_bytes
    assert sum(row.bytes for row in explanation.rows) == explanation.residual_bytes == measured.residual_bytes
    assert "Offloaded to the host: 16.00 KiB" in str(explanation)


def test_a_table_needs_no_other_package():
    """matplotlib is an extra: only the picture imports it. (Flax imports rich.)"""
    program = (
        "import sys, jax, jax.numpy as jnp, memjax\n"
        "x = jax.ShapeDtypeStruct((8, 8), jnp.float32)\n"
        "print(memjax.explain(lambda x: jnp.sum(jnp.sin(x @ x)), x))\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Kept between the passes: 256 B" in done.stdout


def test_several_devices_hold_their_shards():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, all_of_it = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    f = jax.shard_map(
        lambda w, x: jax.lax.pmean(loss(w, x), "data"), mesh=mesh, in_specs=(all_of_it, spec), out_specs=all_of_it
    )
    explanation = memjax.explain(f, W, X)
    assert explanation.residual_bytes == memjax.measure(f, W, X).residual_bytes
    assert sum(row.bytes for row in explanation.rows) == explanation.residual_bytes


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_arguments_have_the_bytes_of_a_device(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    w, x = jnp.ones((64, 256)), jnp.ones((512, 64))
    f = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    put = lambda a, *spec: jax.device_put(a, jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    whole = memjax.explain(f, w, x).residual_bytes
    with jax.set_mesh(mesh):
        args = put(w), put(x, "data")
        found = memjax.explain(f, *args)
        assert found.residual_bytes == memjax.measure(f, *args).residual_bytes == whole // 4
        assert sum(row.bytes for row in found.rows) == found.residual_bytes
        assert found.peak.temp_bytes == memjax.measure(jax.value_and_grad(f, (0, 1)), *args).temp_bytes
    assert any("one of 4 devices" in note for note in found.notes) == (kind == jax.sharding.AxisType.Auto)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: memjax.explain(3), TypeError, r"fn must be a function, got 3.*: call memjax.explain\(fn, \*args\)"),
        (
            lambda: memjax.explain(lambda x: x, 1.0),
            ValueError,
            "fn must be a loss or a training step, got .*: fn has no",
        ),
        (lambda: memjax.explain(loss, W, X, compiler_options=3), TypeError, "compiler_options must be"),
        (lambda: memjax.Explanation.from_json("{}"), ValueError, "text must be what Explanation.to_json wrote"),
    ],
)
def test_errors_say_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_picture_needs_a_program():
    explanation = memjax.Explanation((), (), 0, 0, None, None, notes=("no schedule",))
    with pytest.raises(TypeError, match="path must be a path or an open file, got 3"):
        explanation.plot(3)
    for change in ({"residual_bytes": "x"}, {"offloaded_bytes": -1}, {"notes": "text"}, {"warnings": [3]}):
        with pytest.raises(ValueError, match=r"text must be what Explanation.to_json wrote"):
            memjax.Explanation.from_json(json.dumps(json.loads(explanation.to_json()) | change))
    with pytest.raises(ValueError, match="must have a timeline, got none: no schedule"):
        explanation.plot("never.png")
    with pytest.raises(ValueError, match="must have a timeline, got none: no schedule"):
        explanation.trace("never.json")
    assert explanation.figures() == {"residual_bytes": 0, "offloaded_bytes": 0}


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ("jit(loss)/jvp()/while/body/closed_call", ""),
        ("transpose(jvp(Model))/CheckpointMLP_0/Dense_1", "Model/CheckpointMLP_0/Dense_1"),
        ("jvp(Model)/MLP_1.<lambda>/MLP_1/Dense_0", "Model/MLP_1/Dense_0"),
        ("jvp(Tagger)/RNN_0/Cell_0.scan_fn/Cell_0", "Tagger/RNN_0/Cell_0"),
        ("jit(step)/transpose(jvp(vmap(block)))/cond/branch_0_fun/mlp", "block/mlp"),
        ("jvp(Model)/attention/bqhd,bkhd->bhqk", "Model/attention"),
        ("transpose(jvp(M))/checkpoint/rematted_computation/layers[3]", "M/layers[3]"),
    ],
)
def test_scopes_are_told_from_what_jax_writes(stack, expected):
    assert "/".join(scopes(stack)) == expected
