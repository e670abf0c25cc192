"""jit, vmap, checkpoint, scan, second derivatives, sharding."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax
from tests.linear_cross_entropy.oracle import example, grad, plain, relative_error

ALGORITHMS = ["forward_grad", "recompute"]


def arrays_of_a_loss():
    """x, w, labels, a bias and weights of tokens, for 48 tokens and 64 classes."""
    bias, weights = np.linspace(-1, 1, 64, dtype=np.float32), np.linspace(0, 2, 48, dtype=np.float32)
    return (*map(np.asarray, example(0, 48, 8, 64)), bias, weights)


@cache
def expected_of_a_loss(argnums, **options):
    """Loss and gradients of `arrays_of_a_loss`, and the losses of tokens without bias and weights."""
    x, w, labels, bias, weights = arrays_of_a_loss()

    @jax.jit
    def oracle(x, w, labels, bias, weights):
        whole = lambda x, w, labels, bias, weights: plain(x, w, labels, bias=bias, weights=weights, **options)
        gradients = jax.value_and_grad(whole, argnums=argnums)(x, w, labels, bias, weights)
        return gradients, plain(x, w, labels, reduction="none")

    return jax.device_get(oracle(x, w, labels, bias, weights))


def loss_of(implementation, **options):
    return partial(memjax.linear_cross_entropy, implementation=implementation, chunk=16, **options)


def batched_example():
    x, w, labels = example(1, 60, 8, 33)
    return x.reshape(4, 15, 8), w, labels.reshape(4, 15)


@pytest.mark.parametrize("implementation", ALGORITHMS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_over_a_shared_head(implementation, reduction):
    if reduction == "none" and implementation == "forward_grad":
        pytest.skip("forward_grad has no per-token losses")
    x, w, labels = batched_example()
    coefficients = np.arange(1, 5, dtype=np.float32)

    def value_and_grads(loss):
        def total(x, w):
            values = jax.vmap(lambda x, y: loss(x, w, y, reduction=reduction).sum())(x, labels)
            return (values * coefficients).sum(), values

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))

    lowered = value_and_grads(loss_of(implementation)).lower(x, w)
    actual = lowered.compile()(x, w)
    expected = value_and_grads(plain)(x, w)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, e) < 1e-6
    assert "4x33x8" not in lowered.as_text(), "a gradient of the head per example"


@pytest.mark.parametrize(
    ("implementation", "axes"),
    [
        ("forward_grad", (0, None, 0)),
        ("recompute", (0, None, 0)),
        ("forward_grad", (0, 0, 0)),
        ("recompute", (None, 0, None)),
    ],
)
def test_per_example_gradients(implementation, axes):
    """vmap of grad, and vmap over heads: here a gradient of the head per example is what is asked for."""
    x, w, labels = batched_example()
    w = np.asarray(w)
    heads = np.stack([w, 2 * w, w + 1, -w])
    arguments = [np.asarray(a if axis == 0 else a[0]) for a, axis in zip((x, heads, labels), axes, strict=True)]

    @partial(jax.jit, static_argnums=0)
    def values_and_grads(loss, x, w, labels):
        batched = jax.vmap(loss, in_axes=axes)
        of_each = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=axes)(x, w, labels)
        of_sum = jax.grad(lambda x, w: batched(x, w, labels).sum(), argnums=(0, 1))(x, w)
        return batched(x, w, labels), (of_each, of_sum)

    (values, found), (expected_values, expected) = (
        values_and_grads(loss, *arguments) for loss in (loss_of(implementation), plain)
    )
    assert relative_error(values, expected_values) < 1e-6
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, e) < 1e-5


def mesh(tokens, vocabulary):
    devices = np.array(jax.devices()[: tokens * vocabulary]).reshape(tokens, vocabulary)
    return Mesh(devices, ("t", "v"))


@pytest.mark.parametrize(
    ("shape", "implementation", "grad_inside"),
    [
        *itertools.product([(2, 4)], ["full", *ALGORITHMS], [False, True]),
        ((1, 8), "forward_grad", True),
        ((8, 1), "recompute", True),
    ],
)
def test_sharded(shape, implementation, grad_inside):
    """Tokens and vocabulary sharded, gradients taken outside of and inside the shard_map."""
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}
    chunk = {"forward_grad": 5, "recompute": 3}.get(implementation)

    def local(x, w, labels, bias, weights):
        return memjax.linear_cross_entropy(
            x, w, labels, bias=bias, weights=weights, implementation=implementation, chunk=chunk,
            axis_name="v", token_axis_name="t", **options,
        )  # fmt: skip

    grads = partial(jax.value_and_grad, argnums=(0, 1, 3, 4))
    specs = (P("t"), P("v"), P("t"), P("v"), P("t"))
    grad_specs = tuple(specs[i] for i in (0, 1, 3, 4))
    if grad_inside:
        function = jax.shard_map(grads(local), mesh=mesh(*shape), in_specs=specs, out_specs=(P(), grad_specs))
    else:
        function = grads(jax.shard_map(local, mesh=mesh(*shape), in_specs=specs, out_specs=P()))

    actual, (expected, _) = jax.jit(function)(*arrays_of_a_loss()), expected_of_a_loss((0, 1, 3, 4), **options)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape
        assert relative_error(a, e) < 1e-5


@pytest.mark.parametrize("soft", [False, True])
def test_sharded_losses_and_aux(soft):
    x, w, labels = example(0, 24, 8, 64)
    if soft:
        labels = np.random.default_rng(1).random((24, 64), np.float32)

    def local(x, w, labels):
        return memjax.linear_cross_entropy(
            x, w, labels, reduction="none", axis_name="v", token_axis_name="t", return_aux=True, chunk=3
        )

    label_spec = P("t", "v") if soft else P("t")
    whole = partial(memjax.linear_cross_entropy, reduction="none", return_aux=True, implementation="full")
    expected, expected_aux = jax.jit(whole)(x, w, labels)
    aux_specs = type(expected_aux)(P("t"), P(), P(), P())
    function = jax.shard_map(
        local, mesh=mesh(2, 4), in_specs=(P("t"), P("v"), label_spec), out_specs=(P("t"), aux_specs)
    )
    losses, aux = jax.jit(function)(x, w, labels)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    for a, e in zip(aux, expected_aux, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5)


@pytest.mark.parametrize("implementation", ALGORITHMS)
def test_vocabulary_axis_traffic(implementation):
    """One maximum and at most two sums over the vocabulary's axis, and dx's; the head and its gradient stay where they are."""
    x, w, labels = example(0, 48, 8, 64)
    function = jax.shard_map(
        partial(memjax.linear_cross_entropy, implementation=implementation, axis_name="v"),
        mesh=mesh(1, 8), in_specs=(P(), P("v"), P()), out_specs=P(),
    )  # fmt: skip
    for argnums, dx in (((0, 1), 1), (1, 0)):
        text = jax.jit(jax.grad(function, argnums=argnums)).lower(x, w, labels).compile().as_text()
        assert "all-gather" not in text
        assert "all-to-all" not in text
        reduced = [line for line in text.splitlines() if "all-reduce(" in line]
        assert not [line for line in reduced if "[8,8]" in line], "dW is local"
        kinds = [line.split("to_apply=")[1].split(",")[0] for line in reduced]
        maxima = [kind for kind in kinds if " maximum(" in computation(text, kind)]
        assert len(maxima) == 1
        assert 1 <= len(reduced) - len(maxima) <= 2 + dx


def computation(text, name):
    """The text of one computation of a compiled program."""
    return text.split(f"\n{name} ", 1)[1].split("\n}", 1)[0]


def test_tied_embedding_and_linen_head():
    """The two lines a user swaps, with Flax."""
    import flax.linen as nn
    from flax import nnx

    rngs = nnx.Rngs(0)
    embed, head = nnx.Embed(33, 8, rngs=rngs), nnx.Linear(8, 33, rngs=rngs)
    tokens = np.random.default_rng(0).integers(0, 33, (2, 10), np.int32)

    def tied(embed):
        return memjax.linear_cross_entropy(embed(tokens), embed.embedding[...], jnp.roll(tokens, -1, 1))

    def tied_plain(embed):
        x = embed(tokens)
        return plain(x.reshape(-1, 8), embed.embedding[...], jnp.roll(tokens, -1, 1).reshape(-1))

    def linear(head):
        kernel, bias = head.kernel[...], head.bias[...]
        return memjax.linear_cross_entropy(embed(tokens), kernel, tokens, layout="dv", bias=bias)

    def linear_plain(head):
        log_p = jax.nn.log_softmax(head(embed(tokens)))
        return -jnp.take_along_axis(log_p, tokens[..., None], -1).mean()

    for ours, theirs, module in ((tied, tied_plain, embed), (linear, linear_plain, head)):
        actual, expected = (nnx.jit(nnx.grad(loss))(module) for loss in (ours, theirs))
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert relative_error(a, e) < 1e-5

    dense = nn.Dense(33)
    params = jax.jit(dense.init)(jax.random.key(1), embed(tokens))["params"]

    def linen(params):
        return memjax.linear_cross_entropy(
            embed(tokens), params["kernel"], tokens, layout="dv", bias=params["bias"], chunk=8
        )

    def linen_plain(params):
        log_p = jax.nn.log_softmax(dense.apply({"params": params}, embed(tokens)))
        return -jnp.take_along_axis(log_p, tokens[..., None], -1).mean()

    for a, e in zip(jax.tree.leaves(grad(linen)(params)), jax.tree.leaves(grad(linen_plain)(params)), strict=True):
        assert relative_error(a, e) < 1e-5


# With tracking see `test_sharded`, too.
@pytest.mark.parametrize(
    ("check_vma", "implementation", "grad_inside"),
    [(True, "forward_grad", True), *itertools.product([False], ALGORITHMS, [False, True])],
)
def test_sharded_with_and_without_tracking(check_vma, implementation, grad_inside):
    """Without tracking a gradient taken inside is that of the sum of all devices' losses, as of any `psum`, and what is
    replicated gets only the device's part of it."""
    x, w, labels = example(0, 48, 8, 64)
    loss = partial(memjax.linear_cross_entropy, implementation=implementation, axis_name="v", token_axis_name="t")
    place = partial(jax.shard_map, mesh=mesh(2, 4), in_specs=(P("t"), P("v"), P("t")), check_vma=check_vma)
    if not grad_inside:
        function = jax.grad(place(loss, out_specs=P()), argnums=(0, 1))
    elif check_vma:
        function = place(jax.grad(loss, argnums=(0, 1)), out_specs=(P("t"), P("v")))
    else:

        def summed(x, w, labels):
            dx, dw = jax.grad(loss, argnums=(0, 1))(x, w, labels)
            return jax.lax.psum(dx, "v") / 8, jax.lax.psum(dw, "t") / 8

        function = place(summed, out_specs=(P("t"), P("v")))
    expected = grad(plain, argnums=(0, 1))(x, w, labels)
    for a, e in zip(jax.jit(function)(x, w, labels), expected, strict=True):
        assert relative_error(a, e) < 1e-5


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((P(), P(), P(), P()), r"w must be sharded over the mesh axis 'v', got .* the same on all of its 4 devices"),
        ((P(), P("v"), P(), P()), "bias must be sharded over the mesh axis 'v'"),
        ((P(), P("v"), P(), P("v")), "x must be sharded over the mesh axis 't'"),
    ],
)
def test_what_must_be_sharded_and_is_not_is_refused(specs, message):
    x, w, labels = example(0, 48, 8, 64)
    loss = lambda x, w, labels, bias: memjax.linear_cross_entropy(
        x, w, labels, bias=bias, axis_name="v", token_axis_name="t"
    )
    bias = jnp.zeros(64 if specs[1] == specs[3] else 16)
    with pytest.raises(ValueError, match=message):
        jax.jit(jax.shard_map(loss, mesh=mesh(2, 4), in_specs=specs, out_specs=P()))(x, w, labels, bias)


@pytest.mark.parametrize(
    ("implementation", "of_x", "of_w", "of_labels"),
    [
        ("forward_grad", P("t"), P(), P("t")),
        ("recompute", P(), P(), P()),
        ("forward_grad", P(("t", "v")), P(), P("t")),
        ("recompute", P("t", "v"), P(), P()),
        ("forward_grad", P("t"), P("v"), P("t")),
        ("recompute", P("t"), P("v"), P("t")),
    ],
)
def test_explicit_mesh(implementation, of_x, of_w, of_labels):
    """Arrays whose types say how they are sharded: values, gradients and losses of tokens, and where the gradients are."""
    x, w, labels, bias, weights = arrays_of_a_loss()
    # Bias and weights stay of NumPy, on no mesh.
    x, labels, weights = x.reshape(8, 6, 8), labels.reshape(8, 6), weights.reshape(8, 6)
    options = {"label_smoothing": 0.1}
    explicit = jax.make_mesh((2, 2), ("t", "v"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    loss = lambda x, w, labels: memjax.linear_cross_entropy(
        x, w, labels, weights=weights, bias=bias, implementation=implementation, **options
    )

    @jax.jit
    def ours(x, w, labels):
        losses = memjax.linear_cross_entropy(x, w, labels, reduction="none", return_aux=True)
        return jax.value_and_grad(loss, argnums=(0, 1))(x, w, labels), losses

    expected, expected_losses = expected_of_a_loss((0, 1), **options)
    with jax.set_mesh(explicit):
        arrays = [
            jax.device_put(a, NamedSharding(explicit, spec)) for a, spec in ((x, of_x), (w, of_w), (labels, of_labels))
        ]
        actual, (losses, aux) = ours(*arrays)
        assert [jax.typeof(g) for g in actual[1]] == [jax.typeof(a) for a in arrays[:2]]
        assert tuple(jax.typeof(losses).sharding.spec) == tuple(jax.typeof(arrays[0]).sharding.spec)[:2]
    for a, e in zip(jax.tree.leaves(jax.device_get(actual)), jax.tree.leaves(expected), strict=True):
        assert relative_error(a.reshape(e.shape), e) < 1e-5
    np.testing.assert_allclose(jax.device_get(losses).reshape(48), expected_losses, rtol=1e-5)
    assert jax.device_get(aux.valid_count) == (labels != -100).sum()


def test_activations_that_an_explicit_mesh_shards_along_features_are_refused():
    x, w, labels = example(0, 48, 8, 64)
    explicit = jax.make_mesh((2, 2), ("t", "v"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    x = jax.device_put(x, NamedSharding(explicit, P(None, "t")))
    with jax.set_mesh(explicit), pytest.raises(ValueError, match=r"x must be whole along D, not sharded over \('t',\)"):
        memjax.linear_cross_entropy(x, w, labels)
