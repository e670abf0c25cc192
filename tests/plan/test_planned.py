"""Gradients of planned functions are those of the functions, whatever transforms are around and whatever is inside."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import memjax
from memjax._attention.choice import causal_attention
from tests.plan.networks import (
    LAYERS,
    inputs,
    layer,
    parameters,
    scanned_loss,
    stacked,
    unrolled_loss,
)

pytestmark = pytest.mark.usefixtures("x64")
close = functools.partial(chex.assert_trees_all_close, rtol=1e-10, atol=1e-12)


def check(f, *args, argnums=0, has_aux=False, planned=None, share=None):
    """Within a share of the temporary bytes; or with the least, for which many plans are compiled: it runs most again."""
    differentiate = functools.partial(jax.value_and_grad, argnums=argnums, has_aux=has_aux)
    compiled = lambda f: jax.jit(differentiate(f)).lower(*args).compile()
    temp_nbytes = lambda program: program.memory_analysis().temp_size_in_bytes
    plain = compiled(f)
    budget = int(share * temp_nbytes(plain)) if share else "min"
    program = compiled(memjax.planned(f, budget=budget) if planned is None else planned)
    assert share is None or temp_nbytes(program) <= budget
    expected, got = plain(*args), program(*args)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    close(*jax.device_get((got, expected)))


def test_unrolled_layers():
    check(unrolled_loss, parameters(layers=3), inputs(), argnums=(0, 1), share=0.4)


@pytest.mark.parametrize("budget", ["min", "1GiB"])
def test_scanned_layers(budget):
    planned = memjax.planned(scanned_loss, budget=budget)
    check(scanned_loss, stacked(parameters()), inputs(), argnums=(0, 1), planned=planned)


def test_a_scan_whose_slices_are_integers_and_whose_constants_are_differentiated():
    def loss(scale, x, order):
        def turn(carry, i):
            x, count = carry
            return (jnp.tanh(x * scale[i]) @ jnp.ones((32, 32)) / 32, count + i), x[0, 0]

        (x, count), firsts = jax.lax.scan(turn, (x, 0), order, reverse=True)
        return jnp.sum(x**2) + jnp.sum(firsts), count

    check(loss, jnp.linspace(0.5, 1, 6), inputs(), jnp.arange(6)[::-1], argnums=(0, 1), has_aux=True, share=0.4)


def test_dropout_keys_integers_and_auxiliary_results():
    def loss(params, x, labels, key):
        for p, one in zip(params, jax.random.split(key, 2), strict=True):
            x = jnp.where(jax.random.bernoulli(one, 0.8, x.shape), layer(p, x) / 0.8, 0)
        logits = jax.nn.log_softmax(x)
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1)), {"logits": logits, "labels": labels + 1}

    labels = jnp.arange(256) % 32
    check(loss, parameters(layers=2), inputs(), labels, jax.random.key(3), has_aux=True, share=0.7)


def test_custom_derivatives_are_kept():
    @jax.custom_vjp
    def doubled_gradient(x):
        return jnp.sin(x)

    doubled_gradient.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, ct: (2 * cos * ct,))

    def loss(params, x):
        for p in params:
            x = doubled_gradient(jax.nn.relu(layer(p, x)))
        return jnp.sum(x)

    check(loss, parameters(layers=2), inputs(), share=0.6)


def test_a_rule_may_return_what_it_kept_as_it_is():
    @jax.custom_vjp
    def total(x):
        return jnp.sum(jnp.exp(x))

    total.defvjp(lambda x: (jnp.sum(jnp.exp(x)), jnp.exp(x)), lambda kept, ct: (kept,))

    def loss(params, x):
        return total(x) if params is None else total(x) + unrolled_loss(params, x)

    check(loss, None, inputs(), argnums=1)
    check(loss, parameters(layers=2), inputs(), argnums=(0, 1), share=0.6)


def test_checkpoints_in_the_function_are_taken_out_and_change_nothing():
    def loss(params, x):
        return jnp.sum(jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(p, x), None), x, params)[0] ** 2)

    def unrolled(params, x):
        for p in params:
            x = jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable)(p, x)
        return jnp.sum(x**2)

    check(loss, stacked(parameters()), inputs())
    check(unrolled, parameters(layers=2), inputs(), share=0.4)


def test_our_own_transforms_inside():
    def loss(params, x, labels):
        for p in params:
            x = memjax.remat.tiled(functools.partial(layer, p), tile=64)(x)
        return memjax.linear_cross_entropy(x, params[0]["up"], labels, layout="dv")

    check(loss, parameters(layers=2), inputs(), jnp.arange(256) % 128, share=0.8)


def test_attention_of_a_kernel_by_platform():
    def loss(q, k, v):
        for _ in range(2):
            q = q + causal_attention(q, k, v)
        return jnp.sum(q.astype(jnp.float32) ** 2)

    rng = np.random.default_rng(0)
    q, k, v = (jax.device_put((0.1 * rng.normal(size=(1, 64, 2, 16))).astype(jnp.bfloat16)) for _ in range(3))
    planned = memjax.planned(loss, budget="min")
    found, wanted = (jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v) for f in (planned, loss))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    jax.grad(planned)(q, k, v)  # outside of jax.jit
    text = jax.jit(jax.grad(planned)).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert "fmhaSoftmaxBackward" in text, "a plan has to keep the choice of the platform"


def test_what_the_function_closes_over_is_differentiated():
    x = inputs()

    def outer(planned):
        def of_scale(scale, params):
            wrapped = planned(lambda params: unrolled_loss([jax.tree.map(lambda w: w * scale, p) for p in params], x))
            return wrapped(params) ** 2

        return jax.jit(jax.grad(of_scale, (0, 1)))(1.5, parameters(layers=2))

    close(outer(functools.partial(memjax.planned, budget="min")), outer(lambda f: f))


def test_vmap_outside_and_inside_of_the_gradient():
    params, xs = parameters(layers=2), inputs().reshape(4, 64, 32)
    planned = memjax.planned(unrolled_loss, budget="min")
    each = lambda f: jax.jit(jax.vmap(jax.grad(f), (None, 0)))(params, xs)
    total = lambda f: jax.jit(jax.grad(lambda p: jnp.sum(jax.vmap(f, (None, 0))(p, xs))))(params)
    close(each(planned), each(unrolled_loss))
    close(total(planned), total(unrolled_loss))


def test_shard_map_with_a_collective_inside():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def local(params, x):
        return jax.lax.pmean(unrolled_loss(params, x), "data")

    def gradient(f):
        return jax.jit(jax.shard_map(jax.grad(f), mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec()))

    args = parameters(layers=2), inputs()
    close(gradient(memjax.planned(local, budget="min"))(*args), gradient(local)(*args))


def test_accumulation_over_micro_batches_and_donated_arguments():
    def step(f):
        @functools.partial(jax.jit, donate_argnums=0)
        def run(params, xs):
            def one(total, x):
                return jax.tree.map(jnp.add, total, jax.grad(f)(params, x)), None

            gradients, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), xs)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)

        return run

    xs = inputs().reshape(4, 64, 32)
    planned = memjax.planned(unrolled_loss, budget="min")
    close(*(step(f)(parameters(layers=2), xs) for f in (planned, unrolled_loss)))


def test_derivatives_of_derivatives():
    params, x = parameters(layers=2), inputs()
    direction = jax.tree.map(jnp.ones_like, params)

    def curvature(f):
        along = lambda params: sum(map(jnp.vdot, jax.tree.leaves(jax.grad(f)(params, x)), jax.tree.leaves(direction)))
        return jax.jit(jax.grad(along))(params)

    close(curvature(memjax.planned(unrolled_loss, budget="min")), curvature(unrolled_loss))


def test_gradients_of_another_result_than_the_loss():
    def f(params, x):
        return unrolled_loss(params, x), jnp.sum(x @ params[0]["up"])

    planned = memjax.planned(f, budget="min")
    second = lambda f: jax.jit(jax.grad(lambda *args: sum(f(*args))))(parameters(layers=2), inputs())
    close(second(planned), second(f))


def test_modules_of_nnx_and_what_changes_in_them():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(32, 32, param_dtype=jnp.float64, rngs=rngs)
            self.norm = nnx.BatchNorm(32, param_dtype=jnp.float64, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)
            self.norm.mean.set_value(jnp.zeros(32))
            self.norm.var.set_value(jnp.ones(32))

        def __call__(self, x):
            return self.drop(jnp.tanh(self.norm(self.dense(x))))

    def loss(model, x):
        return jnp.sum(model(model(x)) ** 2)

    make = nnx.jit(lambda: Model(nnx.Rngs(0)))
    models = [make() for _ in range(2)]
    fs = [loss, memjax.planned(loss, budget="500KiB")]
    with jax.numpy_dtype_promotion("standard"):  # as Flax's norm does
        assert memjax.plan(loss, models[1], inputs(), budget="500KiB").stretches
        values = [nnx.jit(nnx.value_and_grad(f))(model, inputs()) for f, model in zip(fs, models, strict=True)]
    values = jax.device_get([(value, nnx.to_pure_dict(gradient)) for value, gradient in values])
    close(values[1], values[0])
    states = jax.device_get([jax.tree.leaves(nnx.state(model, nnx.BatchStat)) for model in models])
    close(states[1], states[0])
    assert not np.allclose(states[0][0], 0)


def test_states_of_nnx_are_values():
    """Under `jax.jit` and `jax.grad` their variables cannot be written to; what does not change is not."""
    model = nnx.BatchNorm(32, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    model.mean.set_value(jnp.zeros(32))
    model.var.set_value(jnp.ones(32))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graph, params, rest, copy=True)
        return jnp.sum(jnp.tanh(model(x)) ** 2), nnx.state(model, nnx.BatchStat)

    with jax.numpy_dtype_promotion("standard"):  # as Flax's norm does
        check(loss, params, rest, inputs(), has_aux=True)


@pytest.mark.parametrize(("reverse", "turns"), [(True, 2), (False, 1)])
def test_turns_of_a_scan_that_keep_different_things(reverse, turns):
    def loss(params, x):
        def turn(x, p):
            return layer(p, x), jnp.sum(x, 0)

        x, sums = jax.lax.scan(turn, x, params, reverse=reverse)
        return jnp.mean(x**2) + jnp.sum(sums * jnp.arange(LAYERS, dtype=x.dtype)[:, None])

    args = stacked(parameters()), inputs()
    little, much = (memjax.plan(loss, *args, budget=budget) for budget in ("min", "1GiB"))
    [i] = [i for i, stretch in enumerate(little.stretches) if stretch.turns is not None]
    first = little.stretches[i]._replace(turns=turns)
    second = next(stretch for stretch in much.stretches if stretch.turns is not None)._replace(turns=LAYERS - turns)
    second = second._replace(handed_on=0)
    assert first.kept != second.kept
    stretches = (*little.stretches[:i], first, second, *little.stretches[i + 1 :])
    plan = dataclasses.replace(little, stretches=stretches)
    assert memjax.Plan.from_json(plan.to_json()) == plan
    planned = memjax.planned(loss, plan=plan)
    check(loss, *args, planned=planned)
    # A loop of one turn is none when it is compiled: what runs again there has to be told from what ran.
    count = lambda plan: str(jax.make_jaxpr(jax.grad(memjax.planned(loss, plan=plan)))(*args)).count(
        "optimization_barrier"
    )
    assert count(plan) - count(little) == (turns == 1)


@pytest.mark.parametrize("network", ["unrolled", "scanned"])
def test_a_plan_that_keeps_all_is_the_program_without_a_plan(network):
    """To the instruction, so that it takes the same bytes. JAX may add two sums of cotangents in the other order."""
    params = parameters(layers=2)
    f, args = (
        (unrolled_loss, (params, inputs())) if network == "unrolled" else (scanned_loss, (stacked(params), inputs()))
    )
    plan = dataclasses.replace(memjax.plan(f, *args, budget=10**9), stretches=())

    def instructions(loss):
        text = jax.jit(jax.value_and_grad(loss)).lower(*args).as_text()
        return sorted(line.split(" = ")[-1].split()[0] for line in text.splitlines() if " = " in line)

    assert instructions(memjax.planned(f, plan=plan)) == instructions(f)
