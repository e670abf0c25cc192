"""Meshes under `jit`: every device computes its own tokens, as inside a `jax.shard_map` written by hand."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from tests.linear_cross_entropy.oracle import example, plain, relative_error

B, T, D, V = 8, 16, 24, 96
ALGORITHMS = [None, "recompute"]


def mesh_of(*sizes, kind=AxisType.Auto):
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, ("t", "v")[: len(sizes)], axis_types=(kind,) * len(sizes), devices=devices)


def arguments():
    x, w, labels = example(0, B * T, D, V)
    return x.reshape(B, T, D), w, labels.reshape(B, T)


def placed(mesh, specs, arrays):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


def step_of(**options):
    return jax.value_and_grad(partial(memjax.linear_cross_entropy, **options), argnums=(0, 1))


@jax.jit
def oracle(x, w, labels):
    flat = lambda x, w: plain(x.reshape(-1, D), w, labels.reshape(-1))
    return jax.value_and_grad(flat, argnums=(0, 1))(x, w)


def close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(jax.device_get(a), e) < 1e-5


def collectives(compiled):
    """Kind and number of elements of what is sent."""
    found = re.findall(
        r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", compiled.as_text()
    )
    shapes = [(kind, shape) for text, kind in found for shape in re.findall(r"\[([\d,]*)\]", text)]
    return sorted((kind, int(np.prod([int(n) for n in shape.split(",") if n]))) for kind, shape in shapes)


SENT = [
    (P(("t", "v")), P(), [("all-reduce", V * D)]),
    (P("v", "t"), P(), [("all-reduce", V * D)]),
    # The head's parameters sharded with the tokens: gathered once, their gradient scattered.
    (P(None, ("t", "v")), P(("t", "v")), [("all-gather", V * D), ("reduce-scatter", V * D // 4)]),
    (P(("t", "v")), P(None, ("t", "v")), [("all-gather", V * D), ("reduce-scatter", V * D // 4)]),
    # The vocabulary on an axis of its own: the head stays where it is.
    (P("t"), P("v"), [("all-reduce", V * D // 2), ("all-reduce", B * T * D // 2)]),
    (P(), P(("v", "t")), [("all-reduce", B * T * D)]),
]


@pytest.mark.parametrize(
    ("of_x", "of_w", "sent", "implementation", "kind"),
    [
        *((*case, ALGORITHMS[i % 2], AxisType.Explicit) for i, case in enumerate(SENT)),
        *((*case, ALGORITHMS[1 - i % 2], AxisType.Auto) for i, case in enumerate(SENT)),
    ],
)
def test_each_device_computes_its_own(implementation, of_x, of_w, sent, kind):
    """Values are right, gradients lie where their arguments do, and of large arrays only what `sent` lists is sent."""
    arrays = arguments()
    mesh = mesh_of(2, 2, kind=kind)
    args = placed(mesh, (of_x, of_w, of_x), arrays)
    with jax.set_mesh(mesh):
        compiled = jax.jit(step_of(implementation=implementation)).lower(*args).compile()
    actual = compiled(*args)
    close(actual, oracle(*arrays))
    assert [g.sharding.is_equivalent_to(a.sharding, a.ndim) for g, a in zip(actual[1], args, strict=False)] == [
        True
    ] * 2
    assert [found for found in collectives(compiled) if found[1] >= V * D // 4] == sorted(sent)


@pytest.mark.parametrize("implementation", ALGORITHMS)
def test_work_and_memory_are_those_of_shard_map(implementation):
    x, w, labels = example(0, 1024, 32, 256)
    mesh = mesh_of(8)
    args = placed(mesh, (P("t"), P(), P("t")), (x, w, labels))
    loss = partial(memjax.linear_cross_entropy, implementation=implementation)
    by_hand = jax.shard_map(
        partial(loss, token_axis_name="t"), mesh=mesh, in_specs=(P("t"), P(), P("t")), out_specs=P()
    )
    ours, theirs = (jax.jit(jax.value_and_grad(f, (0, 1))).lower(*args).compile() for f in (loss, by_hand))
    temp = lambda compiled: compiled.memory_analysis().temp_size_in_bytes
    assert temp(ours) < 1.05 * temp(theirs)
    assert ours.cost_analysis()["flops"] < 1.05 * theirs.cost_analysis()["flops"]
    assert [found for found in collectives(ours) if found[1] > 1] == [("all-reduce", w.size)]


def test_sequence_whose_last_token_is_cut_off():
    """The last device has a row that is no token."""
    x, w, labels = arguments()
    shifted = lambda loss: lambda x, w, y: loss(x[:, :-1], w, y[:, 1:])
    args = placed(mesh_of(2, 2), (P("t", "v"), P(), P("t", "v")), (x, w, labels))
    expected = oracle(x[:, :-1], w, labels[:, 1:])
    for options in ({}, {"implementation": "recompute"}):
        compiled = jax.jit(
            jax.value_and_grad(shifted(partial(memjax.linear_cross_entropy, **options)), argnums=(0, 1))
        ).lower(*args).compile()  # fmt: skip
        assert "all-gather" not in compiled.as_text()
        loss, (dx, dw) = compiled(*args)
        close((loss, (dx[:, :-1], dw)), expected)


@pytest.mark.parametrize("way", ["in_shardings", "constraint", "set_mesh", "two meshes", "eager"])
def test_however_the_mesh_comes_to_be_known(way):
    arrays = arguments()
    host = [np.asarray(a) for a in arrays]
    mesh, specs = mesh_of(2, 2), (P("t", "v"), P(), P("t", "v"))
    args, step = placed(mesh, specs, arrays), step_of()
    constrained = lambda sharding: lambda x, w, y: step(jax.lax.with_sharding_constraint(x, sharding), w, y)
    if way == "in_shardings":
        actual = jax.jit(step, in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs))(*host)
    elif way == "constraint":
        actual = jax.jit(constrained(NamedSharding(mesh, P("t", "v"))))(*host)
    elif way == "set_mesh":
        with jax.set_mesh(mesh):
            actual = jax.jit(constrained(P("t", "v")))(*host)
    elif way == "two meshes":
        other = jax.make_mesh((4,), ("o",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        actual = jax.jit(constrained(NamedSharding(other, P(None, "o"))))(*args)
    else:
        actual = step(*args)
    close(actual, oracle(*arrays))


def test_devices_that_are_no_power_of_two():
    """The order of axes matters where they have different sizes."""
    arrays = arguments()
    for sizes in ((2, 3), (3, 2)):
        mesh = mesh_of(*sizes)
        for of_x, of_w in (
            (P(None, "t" if sizes[0] == 2 else "v"), P("v" if sizes[0] == 2 else "t")),
            (P(), P(("t", "v"))),
        ):
            args = placed(mesh, (of_x, of_w, of_x), arrays)
            close(jax.jit(step_of())(*args), oracle(*arrays))


def loss_with_all_options(name, reduction, x, w, bias, labels, weights, class_weights):
    out, aux = memjax.linear_cross_entropy(
        x, w, labels, bias=bias, weights=weights, class_weights=class_weights, implementation=name,
        reduction=reduction, layout="dv", softcap=3.0, z_loss=0.01, label_smoothing=0.1, return_aux=True,
    )  # fmt: skip
    return jnp.sqrt(1 + out**2).sum(), aux


@partial(jax.jit, static_argnums=(0, 1))
def step_with_all_options(name, reduction, *arrays):
    loss = partial(loss_with_all_options, name, reduction)
    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_all_options_where_everything_is_sharded(kind):
    x, w, _ = arguments()
    labels = np.random.default_rng(3).random((B, T, V), np.float32)
    bias, weights, class_weights = (np.linspace(a, 1, n, dtype=np.float32) for a, n in ((-1, V), (0, B * T), (0.5, V)))
    arrays = (x, w.T, bias, labels, weights.reshape(B, T), class_weights)
    specs = (P("t"), P(None, "v"), P("v"), P("t", None, "v"), P("t"), P())
    mesh = mesh_of(2, 4, kind=kind)
    args = placed(mesh, specs, arrays)
    for name, reduction in ((None, "mean"), ("recompute", "sum"), ("recompute", "none")):
        with jax.set_mesh(mesh):
            actual = step_with_all_options(name, reduction, *args)
        close(actual, step_with_all_options("full", reduction, *arrays))


@pytest.mark.parametrize("order", ["grad of vmap", "vmap of grad"])
def test_batches(order):
    arrays = arguments()
    args = placed(mesh_of(2, 2), (P("t", "v"), P(), P("t", "v")), arrays)

    def step(loss):
        if order == "vmap of grad":
            return jax.jit(jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=(0, None, 0)))
        mean = lambda x, w, y: jax.vmap(loss, in_axes=(0, None, 0))(x, w, y).mean()
        return jax.jit(jax.value_and_grad(mean, argnums=(0, 1)))

    close(step(memjax.linear_cross_entropy)(*args), step(plain)(*arrays))


def test_settings_are_those_of_the_call():
    """XLA asks for a device's program when it compiles, where settings may be others."""
    with jax.enable_x64(True):
        arrays = [a.astype(jnp.float64) if a.dtype == jnp.float32 else a for a in arguments()]
        args = placed(mesh_of(2), (P("t"), P(), P("t")), arrays)
        lowered, expected = jax.jit(step_of()).lower(*args), oracle(*arrays)
    compiled = lowered.compile()
    with jax.enable_x64(True):
        for a, e in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(expected), strict=True):
            assert relative_error(a, e) < 1e-13
    args = placed(mesh_of(2), (P("t"), P(), P("t")), arguments())
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(step_of()).lower(*args)
    products = re.findall(r" dot\(.*", lowered.compile().as_text())
    assert products
    assert all("operand_precision={highest,highest}" in product for product in products)
