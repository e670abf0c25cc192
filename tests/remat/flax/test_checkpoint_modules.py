"""`remat.checkpoint` of Flax modules, classes and instances: the same variables and gradients, in less memory."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import memjax
from memjax.remat import UnmatchedNameWarning, checkpoint, policies

X = jnp.linspace(-1, 1, 64 * 8).reshape(64, 8)
POLICY = policies.save("mlp_hidden")


class Linen(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train=True):
        y = checkpoint_name(nn.Dense(self.width)(x), "mlp_hidden")
        y = nn.BatchNorm(use_running_average=not train)(y)
        y = nn.Dropout(0.3, deterministic=not train)(nn.gelu(y))
        return x + nn.Dense(x.shape[-1])(jnp.sin(y))


class Nnx(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(8, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, x, train=True):
        y = self.norm(checkpoint_name(self.up(x), "mlp_hidden"), use_running_average=not train)
        return x + self.down(jnp.sin(self.dropout(nnx.gelu(y), deterministic=not train)))


def close(got, want):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def linen_gradient(model, variables):
    def loss(params):
        y, updated = model.apply(
            {**variables, "params": params}, X, rngs={"dropout": jax.random.key(1)}, mutable=["batch_stats"]
        )
        return (y**2).sum(), updated

    return loss, jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])


LINEN = {
    "class": lambda **options: checkpoint(Linen, **options)(32),
    "instance": lambda **options: checkpoint(Linen(32), **options),
}


@pytest.mark.parametrize(("kind", "policy"), [("class", POLICY), ("instance", None)], ids=str)
def test_linen(kind, policy):
    plain, model = Linen(32), LINEN[kind](policy=policy)
    assert isinstance(model, Linen)
    init = lambda model: jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    variables = init(plain)
    close(init(model), variables)
    less, (value, grads) = linen_gradient(model, variables)
    more, wanted = linen_gradient(plain, variables)
    close((value, grads), wanted)
    saved = [memjax.measure(lambda p, f=f: f(p)[0], variables["params"]).residual_bytes for f in (less, more)]
    assert saved[0] < saved[1] / 2
    assert (saved[0] >= 64 * 32 * 4) == (policy is not None)


def test_linen_inside_a_parent():
    class Parent(nn.Module):
        wrap: bool
        instance: bool = False

        @nn.compact
        def __call__(self, x):
            block = checkpoint if self.wrap else lambda f, **_: f
            x = block(Linen, static_argnums=2)(16, name="first")(x, False)
            return block(Linen(16, name="second"))(x, False)

    init = lambda model: jax.jit(model.init)(jax.random.key(0), X)
    variables = init(Parent(False))
    close(init(Parent(True)), variables)
    close(*(jax.jit(Parent(wrap).apply)(variables, X) for wrap in (True, False)))


def nnx_gradient(model):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        module = nnx.merge(graph, params, rest, copy=True)
        return (module(X) ** 2).sum(), nnx.state(module, nnx.Not(nnx.Param))

    (value, state), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return (value, nnx.to_pure_dict(state), nnx.to_pure_dict(grads)), loss, params


NNX = {
    "class": lambda **options: checkpoint(Nnx, **options)(32, nnx.Rngs(0)),
    "instance": lambda **options: checkpoint(Nnx(32, nnx.Rngs(0)), **options),
}


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize(("kind", "policy"), [("class", None), ("instance", POLICY)], ids=str)
def test_nnx(kind, policy):
    model = NNX[kind](policy=policy)
    assert isinstance(model, Nnx)
    got, less, params = nnx_gradient(model)
    wanted, more, _ = nnx_gradient(Nnx(32, nnx.Rngs(0)))
    numbers = lambda tree: jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)
    close(numbers(got), numbers(wanted))
    saved = [memjax.measure(lambda p, f=f: f(p)[0], params).residual_bytes for f in (less, more)]
    assert saved[0] < saved[1] / 2
    assert (saved[0] >= 64 * 32 * 4) == (policy is not None)


def test_nnx_updates_in_place_and_shares_variables():
    plain, twin = Nnx(32, nnx.Rngs(0)), Nnx(32, nnx.Rngs(0))
    wrapped = checkpoint(plain)
    close(wrapped(X, True), twin(X))
    close(plain.norm.mean[...], twin.norm.mean[...])
    assert wrapped.up is plain.up
    close(wrapped(X, True), twin(X))  # dropout moved on as well
    close(wrapped(X, False), twin(X, False))


def test_names_and_static_positions_are_checked():
    for model in (
        checkpoint(Linen(8), policy=policies.save("mlp_hiden")),
        checkpoint(Linen, policy=policies.save("b"))(8),
    ):
        with pytest.warns(UnmatchedNameWarning, match="mlp_hidden"):
            jax.eval_shape(model.init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    with pytest.warns(UnmatchedNameWarning, match="did you mean 'mlp_hidden'"):
        nnx.eval_shape(lambda: checkpoint(Nnx(8, nnx.Rngs(0)), policy=policies.save("mlp_hiden"))(X))
    with pytest.raises(TypeError, match="static_argnums must be positions of arguments, got 't'"):
        checkpoint(Linen, static_argnums="train")


def test_what_a_call_is_given_is_updated():
    """Random streams move on, and variables of objects among the arguments of a function, once."""
    ours, plain = nnx.Rngs(0), nnx.Rngs(0)
    for _ in range(2):
        close(checkpoint(nnx.Dropout(0.5))(X, rngs=ours), nnx.Dropout(0.5)(X, rngs=plain))
    model, twin = Nnx(8, nnx.Rngs(0)), Nnx(8, nnx.Rngs(0))
    call = lambda train, models: models["one"](X, train)
    close(checkpoint(call)(True, {"one": model}), twin(X))
    close(nnx.state(model, nnx.BatchStat), nnx.state(twin, nnx.BatchStat))

    def grow(model):
        model.more = nnx.Param(X)
        return X

    with pytest.raises(ValueError, match=r"must keep their structure.* the call changes one of Nnx"):
        checkpoint(grow)(model)
