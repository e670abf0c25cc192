"""Wrong arguments: what is raised, and what it says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import memjax
from tests.linear_cross_entropy.oracle import example


def call(**changes):
    x, w, labels = example(0, 12, 8, 33)
    arguments = {"x": x, "w": w, "labels": labels, **changes}
    return memjax.linear_cross_entropy(arguments.pop("x"), arguments.pop("w"), arguments.pop("labels"), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"labels": jnp.full((12,), 33)},
            ValueError,
            r"labels must be in \[0, 33\).*got 33 at \(0,\) \(12 such labels\)",
        ),
        ({"labels": jnp.full((12,), -1)}, ValueError, r"labels must be .*got -1"),
        ({"labels": np.full((12,), 2**32 + 1)}, ValueError, "labels must be .*got 4294967297"),
        ({"labels": np.full((12,), 2**64 - 1, np.uint64)}, ValueError, "labels must be .*got 18446744073709551615"),
        ({"labels": jnp.zeros((12,), bool)}, TypeError, "labels must be integers.*bool"),
        ({"labels": jnp.zeros((11,), jnp.int32)}, ValueError, r"labels must be of shape \(12,\)"),
        ({"labels": jnp.zeros((12, 32))}, ValueError, r"labels must be .* soft targets of shape \(12, 33\)"),
        ({"labels": [0] * 12}, TypeError, r"labels must be an array, got \[0, 0"),
        ({"labels": None}, TypeError, "labels must be an array, got None"),
        ({"x": None}, TypeError, "x must be an array, got None"),
        ({"x": "text"}, TypeError, "x must be an array, got 'text'"),
        ({"x": jnp.zeros((12, 9))}, ValueError, r"w must be of shape \(V, D\) with x's D = 9"),
        ({"x": jnp.zeros((12, 0)), "w": jnp.zeros((33, 0))}, ValueError, "x must be of shape .* D at least 1"),
        ({"w": jnp.zeros((8, 33))}, ValueError, 'w must be .*stored the other way, pass layout="dv"'),
        (
            {"w": jnp.zeros((33, 8), jnp.bfloat16)},
            TypeError,
            r"w must be of x's dtype float32, got an array of bfloat16",
        ),
        ({"w": jnp.zeros((33, 8, 1))}, ValueError, "w must be an array of 2 dimensions"),
        ({"w": jnp.zeros((0, 8))}, ValueError, "w must be a head with at least one"),
        ({"x": jnp.zeros((12, 8), jnp.int32)}, TypeError, "x must be a floating-point array, got an array of int32"),
        ({"x": jnp.zeros(())}, ValueError, r"x must be of shape \(\.\.\., D\)"),
        ({"layout": "vD"}, ValueError, "layout must be .*'vD'"),
        ({"bias": jnp.zeros((8,))}, ValueError, r"bias must be of shape \(33,\).*float32\[8\]"),
        ({"weights": jnp.zeros((33,))}, ValueError, "weights must be .*class_weights"),
        ({"weights": jnp.zeros((12,), jnp.int32)}, TypeError, "weights must be a floating-point"),
        ({"class_weights": jnp.zeros((12,))}, ValueError, r"class_weights must be of shape \(33,\)"),
        ({"chunk": 0}, ValueError, "chunk must be an integer of at least 1, got 0"),
        ({"chunk": 2.0}, TypeError, "chunk must be an integer"),
        ({"chunk": True}, TypeError, "chunk must be an integer"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be .* in \[0, 1\], got 1.5"),
        ({"softcap": 0.0}, ValueError, "softcap must be .*None"),
        ({"softcap": float("inf")}, ValueError, "softcap must be .*None"),
        ({"z_loss": float("nan")}, ValueError, "z_loss must be a finite"),
        ({"z_loss": True}, TypeError, "z_loss must be a finite number, got True"),
        ({"logit_scale": "8"}, TypeError, "logit_scale must be .*'8'.*multiply x"),
        ({"ignore_index": 0.5}, TypeError, "ignore_index must be an integer"),
        ({"reduction": "avg"}, ValueError, "reduction must be .*'avg'"),
        ({"return_aux": "yes"}, TypeError, "return_aux must be True or False"),
        ({"implementation": "fast"}, ValueError, "implementation must be .*recompute.*'fast'"),
        ({"implementation": "full/jnp"}, ValueError, "implementation must be .*'full/jnp'"),
        ({"implementation": "forward_grad", "reduction": "none"}, ValueError, 'reduction="none"'),
        ({"axis_name": "tp"}, ValueError, "axis_name must be an axis of the mesh .*'tp'"),
        ({"axis_name": ("tp",)}, ValueError, "axis_name must be an axis of the mesh .*'tp'"),
        ({"axis_name": ()}, ValueError, "axis_name must be None"),
        ({"token_axis_name": 3}, TypeError, "token_axis_name must be the name of one mesh axis"),
    ],
)
def test_raises(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="Triton runs there")
@pytest.mark.parametrize("algorithm", ["forward_grad", "recompute"])
def test_a_named_implementation_that_cannot_run(algorithm):
    with pytest.raises(ValueError, match=r"implementation must be one that runs here.*Triton kernels need a GPU"):
        call(implementation=f"{algorithm}/triton")


@pytest.mark.parametrize("implementation", ["full", "forward_grad", "recompute"])
def test_labels_out_of_range_under_jit(implementation):
    """NaN, in the losses of those tokens and in the gradients."""
    x, w, labels = map(np.array, example(0, 12, 8, 33))
    step = jax.jit(
        jax.value_and_grad(lambda w, labels: memjax.linear_cross_entropy(x, w, labels, implementation=implementation))
    )
    each = jax.jit(lambda labels: memjax.linear_cross_entropy(x, w, labels, reduction="none"))
    for wrong in (33, -1, 2**31 - 1):
        labels[5] = wrong
        loss, dw = step(w, labels)
        assert np.isnan(loss)
        assert np.isnan(dw).any()
        assert np.isnan(each(labels)).nonzero()[0].tolist() == [5]


def test_wide_labels_do_not_wrap(x64):
    x, w, labels = example(0, 12, 8, 33)
    wide = labels.astype(jnp.int64).at[3].set(2**32 + 1)
    with pytest.raises(ValueError, match="labels must be "):
        memjax.linear_cross_entropy(x, w, wide)
    losses = jax.jit(lambda y: memjax.linear_cross_entropy(x, w, y, reduction="none"))(wide)
    assert np.isnan(np.asarray(losses)).nonzero()[0].tolist() == [3]


def test_traced_numbers_are_refused():
    with pytest.raises(TypeError, match=r"logit_scale must be a finite number known when tracing.*multiply x"):
        jax.jit(lambda scale: call(logit_scale=scale))(2.0)


def test_labels_of_numpy(recwarn):
    """Compared in NumPy's own dtype: 64 bits do not become 32 with a warning, or wrap."""
    x, w, labels = example(0, 12, 8, 33)
    expected = memjax.linear_cross_entropy(x, w, labels)
    for dtype in (np.int64, np.int16):
        assert memjax.linear_cross_entropy(x, w, np.asarray(labels).astype(dtype)) == expected
    assert not recwarn.list


@pytest.mark.parametrize("library", [np, jnp])
def test_the_largest_number_of_a_dtype_is_an_ignore_index(library):
    x, w, labels = example(0, 12, 8, 33)
    expected = memjax.linear_cross_entropy(x, w, labels, reduction="none")
    wide = np.asarray(labels, np.int64)
    unsigned = np.where(wide == -100, 2**32 - 1, wide).astype(np.uint32)
    got = memjax.linear_cross_entropy(x, w, library.asarray(unsigned), ignore_index=2**32 - 1, reduction="none")
    np.testing.assert_array_equal(got, expected)
    traced = jax.jit(lambda y: memjax.linear_cross_entropy(x, w, y, ignore_index=2**32 - 1, reduction="none"))
    np.testing.assert_allclose(traced(unsigned), expected, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["forward_grad", "recompute"])
def test_soft_targets_are_not_differentiated_silently(implementation):
    x, w, _ = example(0, 12, 8, 33)
    targets = jnp.full((12, 33), 1 / 33)

    def loss(x, targets):
        return memjax.linear_cross_entropy(x, w, targets, implementation=implementation)

    with pytest.raises(ValueError, match="stop_gradient"):
        jax.grad(loss, argnums=1)(x, targets)
    assert jax.grad(loss)(x, targets).shape == x.shape


@pytest.mark.parametrize("implementation", [None, "recompute"])
@pytest.mark.parametrize("jit", [False, True])
def test_forward_mode_is_refused(implementation, jit):
    x, w, labels = example(0, 12, 8, 33)
    loss = lambda x: memjax.linear_cross_entropy(x, w, labels, implementation=implementation)
    directional = lambda x: jax.jvp(loss, (x,), (x,))
    with pytest.raises(TypeError, match=r"linear_cross_entropy cannot be differentiated in forward mode .*\"full\""):
        (jax.jit(directional) if jit else directional)(x)


def test_mesh_axes_are_named_once():
    x, w, labels = example(0, 12, 8, 32)
    ring = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def run(**axes):
        loss = lambda x, w, labels: memjax.linear_cross_entropy(x, w, labels, **axes)
        return jax.shard_map(loss, mesh=ring, in_specs=(P("ring"), P("ring"), P("ring")), out_specs=P())(x, w, labels)

    with pytest.raises(ValueError, match=r"axis_name must be different mesh axes, got \('ring', 'ring'\)"):
        run(axis_name=("ring", "ring"))
    with pytest.raises(ValueError, match="token_axis_name must be other mesh axes than axis_name's"):
        run(axis_name="ring", token_axis_name="ring")


def test_vocabulary_over_an_axis_of_vmap_is_refused():
    x, w, labels = example(0, 12, 8, 32)

    def loss(implementation, w):
        one = lambda w: memjax.linear_cross_entropy(x, w, labels, axis_name="b", implementation=implementation)
        return jax.vmap(one, axis_name="b")(w.reshape(4, 8, 8)).mean()

    np.testing.assert_allclose(jax.jit(partial(loss, "full"))(w), memjax.linear_cross_entropy(x, w, labels), rtol=1e-5)
    for implementation in ("forward_grad", "recompute"):
        with pytest.raises(ValueError, match="axis_name must be a mesh axis, got 'b'"):
            jax.jit(jax.grad(partial(loss, implementation)))(w)


@pytest.mark.parametrize("name", ["z_loss", "label_smoothing"])
def test_schedules_get_advice(name):
    x, w, labels = example(0, 12, 8, 32)
    with pytest.raises(TypeError, match=f"{name} must be .* known when tracing, got .* for a schedule mix the losses"):
        jax.jit(lambda value: memjax.linear_cross_entropy(x, w, labels, **{name: value}))(0.1)


def test_export_with_a_symbolic_number_of_tokens():
    """The default computes gradients in chunks of the vocabulary, then."""
    x, w, labels = example(0, 12, 8, 33)
    (n,), (v,) = export.symbolic_shape("n"), export.symbolic_shape("v")
    struct = jax.ShapeDtypeStruct

    def exported(tokens, classes, **options):
        step = jax.value_and_grad(partial(memjax.linear_cross_entropy, **options), argnums=(0, 1))
        types = struct((tokens, 8), x.dtype), struct((classes, 8), w.dtype), struct((tokens,), labels.dtype)
        return step, export.export(jax.jit(step))(*types)

    step, program = exported(n, 33)
    for a, e in zip(jax.tree.leaves(program.call(x, w, labels)), jax.tree.leaves(step(x, w, labels)), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"x must be of a number of tokens known when tracing, .*\"recompute\""):
        exported(n, 33, implementation="forward_grad")
    with pytest.raises(ValueError, match="w must be of a shape known when tracing"):
        exported(12, v)
