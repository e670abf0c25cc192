"""What each policy keeps, counted in bytes, that values are right, and the warning for unmatched names."""

import functools
import warnings

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import memjax
from memjax.remat import UnmatchedNameWarning, checkpoint, policies

ROWS, WIDTH = 16, 64
NARROW, WIDE = ROWS * WIDTH * 4, ROWS * 4 * WIDTH * 4


def block(w_in, w_out, x):
    h = checkpoint_name(x @ w_in, "mlp_hidden")  # (ROWS, 4 WIDTH)
    y = checkpoint_name(jnp.sin(h) @ w_out, "attention_output")  # (ROWS, WIDTH)
    return jnp.sin(y)


def arguments(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (ROWS, WIDTH)]
    return jax.device_put(tuple(np.asarray(rng.normal(size=shape) / 8, dtype) for shape in shapes))


def kept(f, *args):
    measured = memjax.measure(jax.grad(lambda *args: f(*args).sum()), *args)
    return measured.residual_bytes, measured.offloaded_bytes


POLICIES = [
    (None, 0, 0),
    (policies.save("attention_output"), NARROW, 0),
    (policies.save("mlp_hidden"), WIDE, 0),
    (policies.save("mlp_hidden", "attention_output"), WIDE + NARROW, 0),
    (policies.save("mlp_hidden") | policies.save("attention_output"), WIDE + NARROW, 0),
    (policies.offload("mlp_hidden"), 0, WIDE),
    (policies.save("attention_output") | policies.offload("mlp_hidden"), NARROW, WIDE),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("policy", "device", "host"), POLICIES)
def test_bytes_kept_and_gradients(policy, device, host):
    f = checkpoint(block, policy=policy)
    args = arguments()
    assert kept(f, *args) == (device, host)
    grad = jax.jit(jax.grad(lambda *args: f(*args).sum(), argnums=(0, 1, 2)))
    plain = jax.jit(jax.grad(lambda *args: block(*args).sum(), argnums=(0, 1, 2)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), grad(*args), plain(*args))


def test_bytes_as_jax_saves_them():
    # Independent of memjax.measure: the arrays inside the function that jax.vjp returns.
    args = arguments()
    for policy, device, _ in POLICIES[:5]:
        _, pullback = jax.vjp(checkpoint(block, policy=policy), *args)
        leaves = {id(leaf): leaf for leaf in jax.tree.leaves(pullback) if leaf.shape not in [a.shape for a in args]}
        narrow = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == args[2].shape]
        wide = sum(leaf.nbytes for leaf in leaves.values())
        # The input x, which has the shape of the attention output, is among them.
        assert wide + len({id(leaf) for leaf in narrow}) * NARROW == device + NARROW


@pytest.mark.parametrize("policy", [case[0] for case in POLICIES[1:]])
def test_the_same_as_jax_checkpoint_with_the_built_in_policy(policy):
    args = arguments()
    ours = kept(checkpoint(block, policy=policy), *args)
    assert ours == kept(jax.checkpoint(block, policy=policy.to_jax()), *args)
    assert ours == kept(jax.checkpoint(block, policy=policy), *args)
    assert ours == kept(lambda *args: nnx.remat(block, policy=policy)(*args), *args)


def test_scan_keeps_every_step():
    f = checkpoint(block, policy=policies.save("mlp_hidden") | policies.offload("attention_output"))
    w_in, w_out, x = arguments()

    def scanned(w_in, w_out, x):
        return jax.lax.scan(lambda x, w: (f(*w, x), None), x, (w_in, w_out))[0]

    stacked = jnp.stack([w_in] * 3), jnp.stack([w_out] * 3)
    # Each step's input is saved too.
    assert kept(scanned, *stacked, x) == (3 * (WIDE + NARROW), 3 * NARROW)
    grad = jax.jit(jax.grad(lambda *args: scanned(*args).sum()))(*stacked, x)
    plain = jax.grad(lambda *ws: functools.reduce(lambda x, i: block(ws[0][i], ws[1][i], x), range(3), x).sum())
    np.testing.assert_allclose(grad, plain(*stacked), rtol=1e-5, atol=1e-6)


def test_offloaded_values_are_in_host_memory():
    f = checkpoint(block, policy=policies.offload("mlp_hidden"))
    _, pullback = jax.jit(lambda *args: jax.vjp(f, *args))(*arguments())
    kinds = {leaf.shape: leaf.sharding.memory_kind for leaf in jax.tree.leaves(pullback)}
    assert kinds[(ROWS, 4 * WIDTH)] == "pinned_host"
    assert kinds[(ROWS, WIDTH)] == "device"


def test_vmap_and_second_derivative(x64):
    f = checkpoint(block, policy=policies.save("mlp_hidden"))
    w_in, w_out, x = arguments(jnp.float64)
    xs = jnp.stack([x, 2 * x])

    def of(f):
        second = jax.grad(lambda x: (jax.grad(lambda x: f(w_in, w_out, x).sum())(x) ** 2).sum())
        return jax.jit(jax.vmap(second))(xs)

    np.testing.assert_allclose(of(f), of(block), rtol=1e-12, atol=1e-12)


def test_static_arguments_keywords_and_pytrees():
    def f(mode, params, *, x, scale):
        y = checkpoint_name(params["w"] @ x if mode == "left" else x @ params["w"], "conv_output")
        return {"y": jnp.sin(y) * scale, "none": None}

    w, x = jnp.eye(WIDTH), jnp.ones((WIDTH, WIDTH))
    for static in (0, (-2,)):
        g = checkpoint(f, policy=policies.save("conv_output"), static_argnums=static)
        assert g.__name__ == "f"
        out, pullback = jax.vjp(lambda w, g=g: g("left", {"w": w}, x=x, scale=2.0), w)
        assert out["none"] is None
        (dw,) = pullback(out)
        y = np.sin(1.0)
        np.testing.assert_allclose(out["y"], 2 * y, rtol=1e-6)
        np.testing.assert_allclose(dw, WIDTH * 2 * y * 2 * np.cos(1.0), rtol=1e-5)


@pytest.mark.parametrize("policy", [None, policies.save("conv_output")])
def test_what_is_no_array_is_static(policy):
    """Flags, texts and numbers by keyword, by position and inside of pytrees, as for `planned`."""

    def f(params, x, mode="left", *, train, repeat=1):
        for _ in range(repeat):
            x = checkpoint_name(params["activation"](params["w"] @ x if mode == "left" else x), "conv_output")
        return x.sum() if train else x[:0].sum()

    arguments = {"w": jnp.eye(WIDTH) * 0.5, "activation": jnp.sin}, jnp.ones((WIDTH, WIDTH)), "left"

    def gradient(f, **options):
        of = lambda w: f({**arguments[0], "w": w}, *arguments[1:], **options)
        return jax.jit(jax.grad(of))(arguments[0]["w"])

    for train in (True, False):
        want = gradient(f, train=train, repeat=2)
        np.testing.assert_allclose(gradient(checkpoint(f, policy=policy), train=train, repeat=2), want, rtol=1e-6)
    with pytest.raises(ValueError, match="static_argnums must be positions among 3 arguments, got 3"):
        checkpoint(f, policy=policy, static_argnums=3)(*arguments, train=True)


def test_nnx_module_in_a_closure():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def loss(model, x):
        f = checkpoint(lambda x: jnp.sin(checkpoint_name(model(x), "conv_output")), policy=policies.save("conv_output"))
        return f(f(x)).sum()

    x = jnp.ones((ROWS, WIDTH))
    grads = nnx.jit(nnx.grad(loss))(model, x)
    expected = nnx.grad(lambda model, x: jnp.sin(model(jnp.sin(model(x)))).sum())(model, x)
    np.testing.assert_allclose(grads["kernel"][...], expected["kernel"][...], rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
def test_a_name_that_matches_nothing_warns_once_per_trace():
    f = checkpoint(block, policy=policies.save("mlp_hiden", "attention_output"))
    grad = jax.jit(jax.grad(lambda *args: f(*args).sum()))
    with pytest.warns(UnmatchedNameWarning) as caught:
        jax.block_until_ready([grad(*arguments()), grad(*arguments())])
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "policy keeps 'mlp_hiden', but nothing in block is called so (did you mean 'mlp_hidden'?)" in message
    assert "['attention_output', 'mlp_hidden']" in message
    assert caught[0].filename == __file__
    with pytest.warns(UnmatchedNameWarning, match="'mlp_hiden'"):
        grad(*arguments(jnp.float16))  # another dtype is another trace


def test_every_unmatched_name_is_warned_of():
    f = checkpoint(jnp.sin, policy=policies.save("b") | policies.offload("a"))
    with pytest.warns(UnmatchedNameWarning) as caught:
        jax.eval_shape(f, jnp.ones(3))
    assert ["policy keeps 'a'" in str(w.message) for w in caught] == [True, False]
    assert all("no value in it has a name" in str(w.message) for w in caught)


def named(x):
    return checkpoint_name(jnp.sin(x), "conv_output")


@jax.custom_vjp
def with_rule(x):
    return jnp.sin(x)


with_rule.defvjp(lambda x: (jnp.sin(x), checkpoint_name(jnp.cos(x), "conv_output")), lambda cos, g: (g * cos,))


@pytest.mark.parametrize(
    "f",
    [
        named,
        jax.jit(named),
        jax.checkpoint(named),
        jax.vmap(named),
        lambda x: jax.lax.scan(lambda c, x: (c, named(x)), 0, x)[1],
        lambda x: jax.lax.cond(x[0] > 0, named, jnp.cos, x),
        with_rule,
        lambda x: jax.jit(with_rule)(2 * x),
    ],
    ids=["plain", "jit", "checkpoint", "vmap", "scan", "cond", "custom_vjp rule", "rule in jit"],
)
def test_a_name_anywhere_inside_matches(f):
    g = checkpoint(f, policy=policies.save("conv_output"))
    x = jnp.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, grad = jax.jit(jax.value_and_grad(lambda x: g(x).sum()))(x)
    expected = jax.value_and_grad(lambda x: f(x).sum())(x)
    np.testing.assert_allclose((value, grad[0]), (expected[0], expected[1][0]), rtol=1e-6)


def test_a_name_in_the_rule_of_closed_over_parameters_matches():
    x = jnp.arange(3)
    parameters = jnp.ones(3)

    def loss(parameters):
        f = checkpoint(lambda i: with_rule(parameters)[i].sum(), policy=policies.save("conv_output"))
        return f(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(jax.grad(loss))(parameters)


def test_the_function_itself_runs_once_per_trace():
    calls = []

    def f(x):
        calls.append(1)
        return named(x)

    jax.jit(jax.grad(lambda x: checkpoint(f, policy=policies.save("conv_output"))(x).sum()))(jnp.ones(3))
    assert len(calls) == 1


def test_equal_policies_are_one_to_jax():
    assert policies.save("a", "b") == policies.save("b") | policies.save("a")
    assert policies.save("a", "b").to_jax() is policies.save("b", "a").to_jax()


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"names must be strings, got \['a'\]"):
        policies.save(["a"])
    with pytest.raises(ValueError, match="names must be at least one, got none"):
        policies.offload()
    with pytest.raises(ValueError, match="names must be strings that are not empty"):
        policies.save("")
    with pytest.raises(ValueError, match=r"names must be saved or offloaded, got \['a'\] for both"):
        policies.save("a") | policies.offload("a", "b")
    with pytest.raises(TypeError):
        policies.save("a") | "b"
    with pytest.raises(TypeError, match="f must be a function, got 3"):
        checkpoint(3)
    with pytest.raises(TypeError, match=r"policy must be made by memjax.remat.policies"):
        checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    with pytest.raises(TypeError, match="unexpected keyword"):
        checkpoint(block, policies=None)
