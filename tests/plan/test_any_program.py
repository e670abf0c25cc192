"""Programs with what is rare: effects, constants for results, one array in several arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

import memjax

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
W = np.linspace(0.5, 1.5, 16, dtype=np.float32).reshape(4, 4)


def tanh_loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def check(f, *args, argnums=0):
    differentiate = lambda f: jax.jit(jax.value_and_grad(f, argnums))(*args)
    jax.tree.map(
        lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6),
        differentiate(memjax.planned(f, budget="min")),
        differentiate(f),
    )


def in_a_scan(f):
    """`f(x)` called in each turn of a loop that is differentiated."""

    def loss(w, x):
        def turn(x, w):
            f(x)
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(turn, x, jnp.stack([w, 2 * w]))[0])

    return loss


@pytest.mark.parametrize("wrap", [lambda f: lambda w, x: (f(x), tanh_loss(w, x))[1], in_a_scan], ids=["", "scan"])
def test_an_effect_happens_once_with_values_that_nothing_else_needs(wrap):
    seen = []

    def record(x):
        jax.debug.callback(lambda least: seen.append(float(least)), jnp.min(x) * 3)

    loss = wrap(record)
    jax.block_until_ready(jax.jit(jax.grad(loss))(W, X))
    jax.effects_barrier()
    wanted, seen[:] = list(seen), []
    jax.block_until_ready(jax.jit(jax.grad(memjax.planned(loss, budget="min")))(W, X))
    jax.effects_barrier()
    assert sorted(seen) == pytest.approx(sorted(wanted))


def test_what_an_effect_gives_is_kept():
    seen = []

    def loss(w, x):
        for _ in range(3):
            factor = io_callback(lambda: seen.append(1) or np.float32(len(seen)), jax.ShapeDtypeStruct((), jnp.float32))
            x = jnp.tanh(x @ w * factor)
        return jnp.sum(x)

    jax.block_until_ready(jax.jit(jax.grad(memjax.planned(loss, budget="min")))(W, X))
    assert len(seen) == 3


def test_branches_and_results_that_are_constants():
    check(lambda w, x, i: jax.lax.switch(i, [tanh_loss, lambda w, x: 0.0], w, x), W, X, 0)
    check(lambda w: jnp.float32(3), W)
    check(lambda w, x: (w[0, 0] + 0) if False else 3.0 * jnp.float32(1), W, X, argnums=(0, 1))
    check(lambda scale, unused: scale, jnp.float32(2), X, argnums=(0, 1))


def test_one_array_in_two_arguments():
    two = lambda one, other: tanh_loss(one, X) + jnp.sum(jnp.sin(other))
    w = jax.device_put(W)
    plan = memjax.plan(two, w, w, budget="min", argnums=1)
    np.testing.assert_allclose(jax.grad(memjax.planned(two, plan=plan), 1)(w, w), np.cos(W), rtol=1e-6)


def test_a_module_and_its_clone():
    student = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    teacher = nnx.clone(student)
    loss = lambda student, teacher, x: jnp.sum((jnp.tanh(student(x)) - jnp.cos(teacher(x))) ** 2)
    plan = memjax.plan(loss, student, teacher, X, budget="min")
    got, wanted = (nnx.jit(nnx.grad(f))(student, teacher, X) for f in (memjax.planned(loss, plan=plan), loss))
    jax.tree.map(np.testing.assert_allclose, got, wanted)


class Normalised(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.PathContains("linear")])
def test_modules_are_differentiated_as_nnx_grad_does(wrt):
    def loss(model, x):
        return jnp.sum(jnp.tanh(model(x)))

    argnums = 0 if wrt is nnx.Param else nnx.DiffState(0, wrt)
    plan = memjax.plan(loss, Normalised(nnx.Rngs(0)), X, budget="min", argnums=argnums)
    model, other = Normalised(nnx.Rngs(0)), Normalised(nnx.Rngs(0))
    got = nnx.jit(nnx.grad(memjax.planned(loss, plan=plan), argnums=argnums))(model, X)
    wanted = nnx.jit(nnx.grad(loss, argnums=argnums))(other, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    np.testing.assert_allclose(model.norm.mean[...], other.norm.mean[...], rtol=1e-6)


def test_a_module_that_is_closed_over_and_changed():
    model = Normalised(nnx.Rngs(0))
    for run in (lambda f: memjax.plan(f, X, budget="min"), lambda f: jax.grad(memjax.planned(f, budget="min"))(X)):
        with pytest.raises(TypeError, match=r"f must be a function.*make the object an argument"):
            run(lambda x: jnp.sum(model(x)))


def test_weights_of_one_device_beside_a_sharded_batch():
    mesh = jax.make_mesh((3,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("d")))
    plan = memjax.plan(tanh_loss, jax.device_put(W), x, budget="min")
    got = jax.jit(jax.grad(memjax.planned(tanh_loss, plan=plan)))(jax.device_put(W), x)
    np.testing.assert_allclose(got, jax.grad(tanh_loss)(W, X), rtol=1e-5, atol=1e-6)


def with_rule(forward, backward):
    """tanh, differentiated by a rule."""
    f = jax.custom_vjp(jnp.tanh)
    f.defvjp(lambda x: (jnp.tanh(x), forward(x)), backward)
    return f


RULES = {
    "a residual as it is": with_rule(lambda x: jnp.exp(jnp.sin(x)), lambda kept, ct: (kept,)),
    "the result as it is": with_rule(jnp.tanh, lambda kept, ct: (kept,)),
    "the input as it is": with_rule(lambda x: x, lambda kept, ct: (kept,)),
    "a function of it": with_rule(lambda x: x, lambda kept, ct: (jnp.cos(kept),)),
    "zeros": with_rule(lambda x: x, lambda kept, ct: (jnp.zeros_like(kept),)),
    "None": with_rule(lambda x: x, lambda kept, ct: (None,)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_leaves_its_cotangent_out(name):
    f = RULES[name]

    def row(w, x):
        return jnp.sum(f(f(w)) @ f(w.T)) + jnp.sum(f(jnp.sin(x @ w)))

    def loop(w, x):
        def turn(x, _):
            return f(x @ w), jnp.sum(f(x))

        x, sums = jax.lax.scan(turn, x, length=3)
        return jnp.sum(sums) + f(x)[0, 0]

    check(lambda w: jnp.sum(f(f(w))), W)
    check(lambda w, x: row(w, x) + loop(w, x), W, X, argnums=(0, 1))
