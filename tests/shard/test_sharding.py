"""What every function assumes of how its arguments are sharded: gradients with and without `check_vma`, taken outside and
inside, on Auto and Explicit meshes; and what is refused."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax import linear_cross_entropy
from memjax.shard import MetpAttention, baselines, metp, metp_attention, metp_mlp, vocab_cross_entropy
from tests.shard.rings import FIRST, ROWS, normal, sharded

LABELS = jax.device_put(np.random.default_rng(1).integers(0, 24, (2, 16), np.int32))
MLP = ((2, 16, 6), (6, 8), (8, 6))
ATTENTION = ((2, 16, 4, 2),) * 3


def mlp(x, w_in, w_out):
    return jax.nn.gelu(x @ w_in) @ w_out


# name: (function of the ring, function of one device, shapes, in_specs, out_spec)
CASES = {
    "metp": (partial(metp, jax.nn.gelu), mlp, MLP, (ROWS, ROWS, FIRST), ROWS),
    "metp_mlp": (metp_mlp, mlp, MLP, (ROWS, ROWS, FIRST), ROWS),
    "metp_mlp, products kept": (partial(metp_mlp, recompute=False), mlp, MLP, (ROWS, ROWS, FIRST), ROWS),
    "metp_attention": (
        partial(metp_attention, layout="contiguous", causal=True),
        partial(baselines.attention, causal=True),
        ATTENTION,
        (ROWS,) * 3,
        ROWS,
    ),
    "ulysses": (baselines.ulysses_attention, baselines.attention, ATTENTION, (ROWS,) * 3, ROWS),
    "tp": (baselines.tensor_parallel_mlp, mlp, MLP, (P(), ROWS, FIRST), P()),
    "tp_sp": (baselines.sequence_parallel_mlp, mlp, MLP, (ROWS, ROWS, FIRST), ROWS),
    "gathered": (baselines.gathered_mlp, mlp, MLP, (ROWS, ROWS, FIRST), ROWS),
}
for reduction in ("mean", "sum"):
    CASES[f"vocab_cross_entropy, {reduction}"] = (
        partial(vocab_cross_entropy, reduction=reduction),
        lambda x, w, reduction=reduction: linear_cross_entropy(
            x, w, LABELS, implementation="full", reduction=reduction
        ),
        ((2, 16, 5), (24, 5)),
        (ROWS, FIRST),
        P(),
    )


def over_ring(name, axis_type, check_vma, grad_inside):
    """The gradients in all arguments of a sum with coefficients, of which every device takes its own."""
    f, _, _, specs, out = CASES[name]
    labels = (LABELS,) if name.startswith("vocab") else ()
    label_specs = (ROWS,) * len(labels)
    ring = jax.make_mesh((4,), ("ring",), axis_types=(axis_type,), devices=jax.devices()[:4])
    place = partial(jax.shard_map, mesh=ring, check_vma=check_vma)
    local = lambda args, labels: f(*args, *labels, axis_name="ring")

    def summed(args, labels, coefficients):
        return (local(args, labels) * coefficients).sum()

    def inside(args, labels, coefficients):
        grads = jax.grad(summed)(args, labels, coefficients)
        if check_vma or out != P():
            return grads
        # Of the sum of what all devices return; what is replicated has parts of it on each.
        return tuple((jax.lax.psum(g, "ring") if spec == P() else g) / 4 for g, spec in zip(grads, specs, strict=True))

    def gradients(args, coefficients):
        if grad_inside:
            return place(inside, in_specs=(specs, label_specs, out), out_specs=specs)(args, labels_of(), coefficients)
        whole = place(local, in_specs=(specs, label_specs), out_specs=out)
        return jax.grad(lambda args: (whole(args, labels_of()) * coefficients).sum())(args)

    put = lambda a, spec: jax.device_put(a, NamedSharding(ring, spec))
    labels_of = lambda: tuple(put(a, ROWS) for a in labels)

    def run(args, coefficients):
        with jax.set_mesh(ring):
            placed = tuple(put(a, spec) for a, spec in zip(args, specs, strict=True))
            return jax.device_get(jax.jit(gradients)(placed, put(coefficients, out)))

    return run


@functools.cache
def on_one_device(name):
    """Arguments, coefficients, and the gradients of the function of one device."""
    _, plain, shapes, _, _ = CASES[name]
    args = tuple(normal(*shapes))
    (coefficients,) = normal(jax.eval_shape(plain, *args).shape, seed=1)
    return args, coefficients, jax.jit(jax.grad(lambda args: (plain(*args) * coefficients).sum()))(args)


HOW = [
    (AxisType.Auto, False, True),
    (AxisType.Explicit, True, False),
    (AxisType.Auto, False, False),
    (AxisType.Explicit, True, True),
]
EVERY_WAY = ("metp", "metp_mlp", "metp_attention", "vocab_cross_entropy, mean", "tp")


@pytest.mark.parametrize(
    ("name", "axis_type", "check_vma", "grad_inside"),
    [(name, *how) for name in CASES for how in (HOW if name in EVERY_WAY else HOW[:2])],
)
def test_gradients_are_those_of_one_device(x64, name, axis_type, check_vma, grad_inside):
    args, coefficients, expected = on_one_device(name)
    got = over_ring(name, axis_type, check_vma, grad_inside)(args, coefficients)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def refusal(f, shapes, specs):
    with pytest.raises(ValueError, match=r"must be sharded over the mesh axis 'ring'.*, got .* give it") as error:
        sharded(lambda *args: f(*args, axis_name="ring"), 2, specs, specs[0])(*normal(*shapes, dtype=np.float32))
    return str(error.value).split()[0]


@pytest.mark.parametrize(
    ("name", "names"),
    {
        "metp": ("", "b", "c"),
        "metp_mlp": ("", "w_in", "w_out"),
        "metp_attention": ("q", "k", "v"),
        "ulysses": ("q", "k", "v"),
        "tp": ("", "w_in", "w_out"),
        "tp_sp": ("x", "w_in", "w_out"),
        "gathered": ("", "w_in", "w_out"),
    }.items(),
)
def test_what_is_the_same_on_all_devices_is_refused(name, names):
    """Their shapes are those that a device's own parts would have, so that only their types tell."""
    f, _, shapes, specs, _ = CASES[name]
    for i, argument in enumerate(names):
        if argument:
            part = lambda shape, spec: [n // (2 if axis == "ring" else 1) for n, axis in zip(shape, spec, strict=False)]
            local = [*part(shapes[i], (*specs[i], *[None] * 4)), *shapes[i][len(specs[i]) + 4 :]]
            changed = [*shapes[:i], tuple(local), *shapes[i + 1 :]]
            assert refusal(f, changed, (*specs[:i], P(), *specs[i + 1 :])) == argument


def test_head_or_tokens_that_are_the_same_on_all_devices_are_refused():
    loss = lambda x, w, axis_name: vocab_cross_entropy(x, w, (0 * x[..., 0]).astype("int32"), axis_name=axis_name)
    assert refusal(loss, ((2, 8, 5), (24, 5)), (ROWS, P())) == "w"
    assert refusal(loss, ((2, 8, 5), (24, 5)), (P(), FIRST)) == "x"
    constant = lambda x, w, axis_name: vocab_cross_entropy(x, w, jnp.zeros(x.shape[:2], jnp.int32), axis_name=axis_name)
    assert refusal(constant, ((2, 8, 5), (24, 5)), (ROWS, FIRST)) == "labels"


@pytest.mark.parametrize("name", ["x", "labels", "weights", "class_weights"])
def test_tokens_that_differ_where_the_vocabulary_is_sharded_are_refused(name):
    """Unless they are gathered to the same on all devices."""
    x, w = normal((8, 5), (24, 5), dtype=np.float32)
    arrays = {
        "labels": np.zeros(8, np.int32),
        "weights": np.ones(8, np.float32),
        "class_weights": np.ones(24, np.float32),
    }
    arrays = {"x": np.asarray(x), **arrays}
    doubled = arrays | {name: np.concatenate([arrays[name]] * 2)}
    specs = dict.fromkeys(arrays, P()) | {name: FIRST}

    def over(change):
        local = lambda arrays, w: linear_cross_entropy(w=w, axis_name="ring", **change(arrays))
        return sharded(local, 2, (specs, FIRST), P())

    with pytest.raises(
        ValueError, match=f"^{name} must be the same on all devices of the mesh axis 'ring', got .*invarying"
    ):
        over(lambda arrays: arrays)(doubled, w)
    gathered = over(
        lambda arrays: arrays | {name: jax.lax.all_gather(arrays[name], "ring", tiled=True, to="invarying")}
    )
    whole = jax.jit(lambda arrays, w: linear_cross_entropy(w=w, **arrays))
    np.testing.assert_allclose(gathered(arrays, w), whole(arrays, w), rtol=1e-6)


def test_tokens_of_a_tensor_parallel_layer_that_differ_are_refused():
    x, w_in, w_out = normal((2, 8, 4), (4, 16), (16, 4), dtype=np.float32)
    local = lambda x, w_in, w_out: baselines.tensor_parallel_mlp(x, w_in, w_out, axis_name="ring")
    with pytest.raises(ValueError, match=r"^x must be the same on all devices of the mesh axis 'ring'"):
        sharded(local, 2, (ROWS, ROWS, FIRST), P())(x, w_in, w_out)


def test_modules_parameters_that_are_not_sharded_are_refused():
    graph, params = nnx.split(MetpAttention(8, 4, rngs=nnx.Rngs(0)))
    (x,) = normal((2, 16, 8), dtype=np.float32)
    with pytest.raises(ValueError, match="query must be sharded over the mesh axis 'ring'"):
        sharded(lambda params, x: nnx.merge(graph, params)(x), 2, (P(), ROWS), ROWS)(params, x)


def test_axes_of_an_explicit_mesh_that_are_left_out_are_refused():
    both = jax.make_mesh((2, 2), ("data", "ring"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    x, w_in, w_out = normal(*MLP, dtype=np.float32)
    specs = (P("data", "ring"), P(None, "ring"), P("ring"))
    with jax.set_mesh(both):
        args = [jax.device_put(a, NamedSharding(both, spec)) for a, spec in zip((x, w_in, w_out), specs, strict=True)]
        ring = [P(*(axis if axis == "ring" else None for axis in spec)) for spec in specs]
        f = jax.shard_map(
            partial(metp_mlp, axis_name="ring"), in_specs=tuple(ring), out_specs=ring[0], axis_names={"ring"}
        )
        with pytest.raises(ValueError, match=r"x must be this device's own array.*'data'.*make these axes manual too"):
            jax.jit(f)(*args)
