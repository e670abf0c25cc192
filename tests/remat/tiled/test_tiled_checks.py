"""What `tiled` refuses because it depends on how many positions there are, or because a derivative rule mixes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.remat import tiled

TABLE = np.linspace(-1, 1, 800, dtype=np.float32).reshape(100, 8)
X = np.linspace(-2, 2, 2 * 13 * 8, dtype=np.float32).reshape(2, 13, 8)


def with_gradient(rule):
    """The identity, whose backward pass is `rule`."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, ct: (rule(ct),))
    return identity


@jax.custom_jvp
def mean_of_all(x):
    return x + 0


mean_of_all.defjvp(lambda primals, tangents: (primals[0], tangents[0] * jnp.mean(primals[0])))

DEPENDS = {
    "sum of ones": lambda x: x / jnp.sum(jnp.ones_like(x), 1, keepdims=True),
    "product of ones": lambda x: x * jnp.dot(jnp.ones(x.shape[1]), jnp.ones(x.shape[1])),
    "last of an arange": lambda x: x * jnp.arange(x.shape[1], dtype=x.dtype)[-1],
    "row of a table": lambda x: x + TABLE[x.shape[1] - 1],
    "row of an array": lambda x: x + jax.lax.slice(jnp.asarray(TABLE), (x.shape[1] - 1, 0), (x.shape[1], 8))[0],
    "power": lambda x: x ** x.shape[1],
    "turns": lambda x: jax.lax.fori_loop(0, x.shape[1], lambda _, x: x / 2, x),
    "gradient by its norm": with_gradient(lambda ct: ct / jnp.linalg.norm(ct)),
    "gradient less its mean": with_gradient(lambda ct: ct - jnp.mean(ct, 1, keepdims=True)),
    "gradient over the length": with_gradient(lambda ct: ct / ct.shape[1]),
    "gradient by position": with_gradient(lambda ct: ct * jnp.arange(ct.shape[1], dtype=ct.dtype)[:, None]),
    "tangent": mean_of_all,
}


@pytest.mark.parametrize("name", DEPENDS)
def test_it_is_refused(name):
    with pytest.raises(ValueError, match=r"f must not mix positions, got .*, in which .*check=False"):
        tiled(DEPENDS[name], 1, 1, tile=4)(X)


@jax.custom_vjp
def scaled(scale, x):
    return scale * x


scaled.defvjp(
    lambda scale, x: (scale * x, (scale, x)),
    lambda saved, ct: (jnp.sum(ct * saved[1], (0, 1)), jnp.clip(saved[0] * ct, -1, 1)),
)

APART = {
    "ones": lambda x: x * jnp.ones_like(x) + jnp.zeros((x.shape[1], 8)),
    "gradients clipped, and a scale's summed": lambda x: scaled(jnp.arange(8.0), x),
    "gradients by norms of features": with_gradient(lambda ct: ct / (1 + jnp.linalg.norm(ct, axis=-1, keepdims=True))),
    "derivatives that use themselves": lambda x: jnp.logaddexp(jax.nn.relu6(x), 0),
    "solve": lambda x: jnp.linalg.solve(jnp.eye(8) + x[..., None] * x[..., None, :], x[..., None])[..., 0],
    "reduce": lambda x: x + jax.lax.reduce(x, np.float32(0), jax.lax.add, (2,))[..., None],
    "stack": lambda x: jnp.stack(jnp.unstack(x, axis=-1)[::-1], -1),
    "features gathered": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
}


@pytest.mark.parametrize("name", APART)
def test_it_is_accepted(name):
    on = lambda f: jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(f(x)))))(X)
    for got, wanted in zip(on(tiled(APART[name], 1, 1, tile=4)), on(APART[name]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=1e-3)
