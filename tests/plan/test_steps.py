"""Backward passes in steps: the same gradients in fewer bytes, and plans that fit for that."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax._core.arrays import is_on_host
from memjax._plan.solve.order import results_first
from memjax._plan.solve.steps import in_steps, run_steps
from tests.plan import networks

WIDTH, HIDDEN, LAYERS, BATCH, LENGTH, HEADS = 64, 256, 2, 1, 512, 4


def layer(p, x):
    """Attention and a gated layer, the derivatives of which make several wide arrays from the same ones."""
    h = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
    q, k, v = (jnp.reshape(h @ p[name], (BATCH, LENGTH, HEADS, -1)) for name in ("q", "k", "v"))
    shares = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
    x = x + jnp.reshape(jnp.einsum("bnts,bsnh->btnh", shares, v), x.shape)
    return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def loss(params, x):
    for p in params:
        x = layer(p, x)
    return jnp.mean(x**2)


def arguments():
    rng = np.random.default_rng(0)
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    shapes |= dict.fromkeys(("q", "k", "v"), (WIDTH, WIDTH))
    draw = lambda shape: jax.device_put(np.asarray(0.1 * rng.normal(size=shape), jnp.float32))
    params = [{name: draw(shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    return params, jax.device_put(np.asarray(rng.normal(size=(BATCH * LENGTH, WIDTH)), jnp.float32))


@functools.cache
def least_plan():
    return memjax.plan(loss, *arguments(), budget="min")


def temp(f, *args):
    return jax.jit(jax.value_and_grad(f)).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_steps_take_fewer_bytes_and_a_budget_is_met_with_them():
    f, args = loss, arguments()
    least = least_plan()
    assert least.in_steps
    otherwise = temp(memjax.planned(f, plan=dataclasses.replace(least, in_steps=False)), *args)
    assert least.compiled_nbytes < 0.9 * otherwise
    assert temp(memjax.planned(f, plan=least), *args) == least.compiled_nbytes
    assert memjax.plan(f, *args, budget=least.compiled_nbytes).in_steps
    assert not memjax.plan(f, *args, budget="1GiB").in_steps
    assert memjax.Plan.from_json(least.to_json()) == least
    assert "one after another" in str(least)


def forwards(rows):
    def turn(state, row):
        new = 0.9 * jnp.sin(state) + jnp.tanh(row)
        return new, (new, 0.9 * jnp.cos(state), 1 - jnp.tanh(row) ** 2)

    return jax.lax.scan(turn, jnp.zeros_like(rows[0]), rows)[1]


@jax.custom_vjp
def recurrence(rows, early):
    """The states of a recurrence; backwards their loop reads what was made long before it, and the loop forwards does not."""
    return forwards(rows)[0]


def backwards(kept, cts):
    def turn(ct, slices):
        by_state, by_row, early, one = slices
        ct = ct + one
        return by_state * ct, by_row * ct * early

    rows = jax.lax.scan(turn, jnp.zeros_like(cts[0]), (*kept, cts), reverse=True)[1]
    return rows, jnp.zeros_like(rows)


recurrence.defvjp(lambda rows, early: ((out := forwards(rows))[0], (*out[1:], early)), backwards)


def recurrent_loss(params, x):
    early = jnp.sin(x @ params[0]["up"])
    for p in params[1:3]:
        x = networks.layer(p, x)
    return jnp.mean(recurrence(x @ params[3]["up"], early) ** 2)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("f", [networks.unrolled_loss, networks.scanned_loss, recurrent_loss])
def test_gradients_in_steps(f):
    params, x = networks.parameters(), networks.inputs()
    args = (networks.stacked(params) if f is networks.scanned_loss else params, x)
    plan = dataclasses.replace(memjax.plan(f, *args, budget="min"), in_steps=True)
    found = jax.jit(jax.value_and_grad(memjax.planned(f, plan=plan)))(*args)
    wanted = jax.jit(jax.value_and_grad(f))(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def program(f, *shapes):
    return jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).jaxpr


def test_what_leads_to_results_comes_first():
    jaxpr = program(lambda x, y: (jnp.sin(x), jnp.cos(jnp.tan(y))), (4,), (4,))
    sin, tan, cos = jaxpr.eqns
    assert results_first(jaxpr.eqns, [cos.outvars[0]]) == [tan, cos, sin]
    assert results_first(jaxpr.eqns, [sin.outvars[0]]) == [sin, tan, cos]


def test_steps_compute_what_the_program_does():
    """What is in no memory is computed again in each step that reads it, and what waits has its old value."""

    def f(gate, up, ct):
        sig = jax.nn.sigmoid(gate)
        one, other = ct * up * sig * (1 + gate * (1 - sig)), ct * gate * sig
        return one @ up.T, other @ gate.T, (sig * up).T @ ct

    shapes = ((8, 64),) * 3
    jaxpr = program(f, *shapes)
    steps = in_steps(jaxpr.eqns, jaxpr.outvars[:2], jaxpr.outvars[2:], "cuda")
    assert any(step.waits for step in steps)
    values = [jax.random.normal(jax.random.key(i), shape, jnp.float32) for i, shape in enumerate(shapes)]
    found = run_steps(steps, dict(zip(jaxpr.invars, values, strict=True)), jaxpr.outvars)
    for var, expected in zip(jaxpr.outvars, f(*values), strict=True):
        np.testing.assert_allclose(found[var], expected, rtol=1e-5, atol=1e-5)


def test_what_moves_and_numbers_do_not_wait():
    """Or XLA:GPU would fetch a slice from the host while nothing runs, and by a kernel, as it does not see its number."""

    def f(x, stack, number):
        row = jax.device_put(jax.lax.dynamic_slice(stack, (number, jnp.uint32(0)), (1, 64)), jax.memory.Space.Device)
        y = jnp.sin(x) @ row.T
        return jax.lax.dynamic_update_slice(jnp.cos(x), y * row, (number, jnp.uint32(0))) @ x.T

    space = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    stack = jax.device_put(jnp.ones((4, 64)), space)
    jaxpr = jax.make_jaxpr(f)(jnp.ones((4, 64)), stack, jnp.uint32(1)).jaxpr
    steps = in_steps(jaxpr.eqns, (), jaxpr.outvars, "cuda")
    waiting = [var for step in steps for var in step.waits]
    assert waiting
    assert all(var.aval.shape and not is_on_host(var.aval) for var in waiting)
    fetching = [step for step in steps if step.eqns[-1].primitive.name in ("dynamic_slice", "device_put")]
    assert [step.waits for step in fetching] == [[], []]


def test_a_plan_for_another_platform_is_acted_on_in_its_steps():
    """So that what is compiled ahead for a GPU on a machine without one takes what the plan says."""
    f, args = loss, arguments()
    plan = least_plan()
    assert plan.platform == "cpu"
    equations = lambda plan: str(jax.make_jaxpr(jax.grad(memjax.planned(f, plan=plan)))(*args))
    there = dataclasses.replace(plan, platform="cuda")
    assert equations(there) != equations(plan)
    assert equations(memjax.Plan.from_json(there.to_json())) == equations(there)
