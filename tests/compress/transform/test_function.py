"""Arguments and results of `compressed` functions and modules that are no arrays, and what cannot be traced."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax import compressed
from memjax.compress import Cast

X = jnp.asarray(np.linspace(-1, 1, 8192, dtype=np.float32).reshape(64, 128))


class Codec:
    """The three methods that a user's codec needs."""

    def encode(self, x):
        return x.astype(jnp.bfloat16), jnp.zeros((), x.dtype)

    def decode(self, code):
        return code[0].astype(code[1].dtype)

    def nbytes(self, aval):
        return 2 * aval.size + aval.dtype.itemsize


def test_a_codec_of_three_methods_will_do():
    f = lambda x: jnp.sum(jnp.tanh(jnp.exp(x)) ** 2)
    own, cast = (compressed(f, codec, inputs=True) for codec in (Codec(), Cast(jnp.bfloat16)))
    got, want = (jax.jit(jax.grad(g))(X) for g in (own, cast))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(got, jax.jit(jax.grad(f))(X), rtol=1e-5, atol=1e-6)
    for missing in ("encode", "decode", "nbytes"):
        kind = type("Incomplete", (Codec,), {missing: None})
        with pytest.raises(TypeError, match="codec must be a codec, got"):
            compressed(f, kind())


class Named(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(128))

    def __call__(self, batch, mode):
        y = jnp.tanh(batch["x"] * self.w) * batch["factor"]
        return {"y": y, "mode": mode, "labels": batch["labels"], "none": None, "number": 3}


@pytest.mark.parametrize("wrap", [lambda f: f, compressed])
def test_leaves_that_are_no_arrays_pass_through(wrap):
    labels, outs = np.array(["a", "b"], object), []

    def loss(x):
        outs.append(wrap(Named())({"x": x, "factor": 2.5, "labels": labels}, "train"))
        return jnp.sum(outs[0]["y"])

    gradient = jax.jit(jax.grad(loss))(X)
    [out] = outs
    assert (out["mode"], out["none"], type(out["number"]), out["number"]) == ("train", None, int, 3)
    assert out["labels"] is labels
    np.testing.assert_allclose(gradient, 2.5 * (1 - np.tanh(X) ** 2), rtol=0.03, atol=0.02)


class Branches(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "call",
    [
        lambda: compressed(lambda x: x if x.sum() > 0 else -x)(X),
        lambda: compressed(lambda x: x * float(x.sum()))(X),
        lambda: compressed(lambda x: np.asarray(x) + 1)(X),
        lambda: compressed(lambda x, n: x.reshape(n))(X, np.array([128, 64])),
        lambda: compressed(jax.jit(jnp.roll, static_argnums=1))(X, jnp.int32(1)),
        lambda: compressed(lambda x: {x: 1})(X),
        lambda: compressed(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))(X, deterministic=jnp.array(True)),
        lambda: compressed(Branches()).init(jax.random.key(0), X),
    ],
    ids=["if", "float", "numpy", "shape", "static argument", "key", "nnx", "linen"],
)
def test_what_needs_the_value_of_an_array_is_refused_with_the_fix(call):
    needs = "it needs the value of an array or a number for `if`,"
    wanted = f"f_or_module must be a function that JAX can trace, got .*: {needs}.* says: "
    with pytest.raises(TypeError, match=wanted):
        call()


def test_other_errors_of_functions_are_theirs():
    with pytest.raises(ZeroDivisionError):
        compressed(lambda x: x * (1 // 0))(X)
    with pytest.raises(TypeError, match="unsupported operand"):
        compressed(lambda x, y: x + y)(X, "a")


class Growing(nnx.Module):
    def __call__(self, x):
        self.last = nnx.Intermediate(x)
        return x


def test_modules_that_change_more_than_values_are_refused():
    with pytest.raises(
        ValueError,
        match=r"the call changes one of Growing: it adds, removes or replaces variables.*Make them in __init__",
    ):
        compressed(Growing())(X)
