"""What `explain` takes, and how it refuses the rest."""

import jax
import jax.numpy as jnp
import pytest

import memjax
from memjax._core.scopes import scopes

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def loss(w, x):
    return jnp.mean(jnp.sin(x @ w))


W = jax.ShapeDtypeStruct((32, 32), jnp.float32)


def test_losses_gradients_and_steps_keep_the_same():
    step = jax.jit(lambda w, x: w - jax.grad(loss)(w, x), donate_argnums=0)
    rows = [memjax.explain(f, W, X).rows for f in (loss, jax.jit(loss), jax.value_and_grad(loss), step)]
    kept = [[(row.bytes, row.producer, row.shape) for row in some] for some in rows]
    assert kept[0] == kept[1] == kept[2] == kept[3] == [(64 * 32 * 4, "cos", (64, 32))]


def test_auxiliary_results_are_not_differentiated():
    explanation = memjax.explain(lambda w, x: (loss(w, x), jnp.exp(w)), W, X)
    assert [row.producer for row in explanation.rows] == ["cos"]


def test_several_devices_hold_their_shards():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, all_of_it = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    f = jax.shard_map(
        lambda w, x: jax.lax.pmean(loss(w, x), "data"), mesh=mesh, in_specs=(all_of_it, spec), out_specs=all_of_it
    )
    explanation = memjax.explain(f, W, X)
    assert explanation.residual_bytes == memjax.measure(f, W, X).residual_bytes
    assert sum(row.bytes for row in explanation.rows) == explanation.residual_bytes


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
    with pytest.raises(ValueError, match="must have a timeline, got none: no schedule"):
        explanation.plot("never.png")


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
