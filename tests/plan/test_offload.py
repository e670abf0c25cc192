"""Plans that move what loops keep to the host: the same gradients, fewer bytes on the device, and the time of the link."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax._core.check import readable_bytes
from memjax._core.program import costs
from memjax._core.program.costs import array_bytes
from memjax._plan.budget.stretches import stretches
from memjax._plan.budget.too_little import what_moving_saves
from memjax._plan.derivative import Derivative
from memjax._plan.flat import Flat
from memjax._plan.memory.layout import Layout
from memjax._plan.solve.chain import Chain
from tests.plan import networks

[H200] = [rates for rates in costs._DEVICES if rates.kind == "H200"]
ALLOW = ("recompute", "offload")


def chain(f, *args, offload=True, rates=H200):
    program = Flat(f, args, {}).program()
    wrt = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in program.types]
    derivative = Derivative(program.closed, program.types, wrt, program.has_cotangent, {})
    return Chain(derivative, rates, offload=offload)


def scanned(params, x):
    """Layers of which a turn computes for long enough that a copy of `x` is hidden."""

    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    return jnp.sum(jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)


def shapes(layers=6, rows=16384, width=4096, hidden=16384):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return {"up": array(layers, width, hidden), "down": array(layers, hidden, width)}, array(rows, width)


def moved(choices):
    return [var for one in choices for _, part in one.option.parts for var in part.moved]


def test_what_is_carried_moves_where_the_link_is_fast_and_stays_where_it_is_slow():
    args = shapes()
    exact = chain(scanned, *args, offload=False)
    assert not any(moved([*exact.choices(nbytes)]) for nbytes, _ in exact.frontier)
    fast = chain(scanned, *args)
    carried = 2 * 16384 * 4096
    least, otherwise = fast.frontier[0], exact.frontier[0]
    assert [array_bytes(var) for var in moved(fast.choices(least[0]))] == [carried]
    # Of six turns five stack something: the last is no loop when it is compiled, and has what it keeps once either way.
    assert [turns for one in exact.choices(otherwise[0]) for turns, _ in one.option.parts] == [5, 1]
    assert least[0] == otherwise[0] - 5 * carried
    slow = chain(scanned, *args, rates=H200._replace(link=H200.link / 1e3))
    assert slow.frontier[0][0] == least[0]
    assert slow.frontier[0][1] > 10 * least[1]
    for nbytes, seconds in exact.frontier:  # never slower at equal memory
        assert min(other for few, other in fast.frontier if few <= nbytes) <= seconds * (1 + 1e-9)


def test_a_turn_waits_for_what_the_link_takes_longer_for():
    """Without anything to compute, both copies are waited for."""

    def only_moves(x, w):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x) * w, None), x, w)[0])

    args = jax.ShapeDtypeStruct((1 << 24,), jnp.float32), jax.ShapeDtypeStruct((6,), jnp.float32)
    there, here = (chain(only_moves, *args, offload=offload).frontier[0] for offload in (True, False))
    copies = 2 * 6 * 4 * (1 << 24) / H200.link
    assert there[0] < here[0] - 5 * 4 * (1 << 24)
    assert 0.8 * copies < there[1] - here[1] <= copies


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("budget", "transformation"), [("min", "jit"), ("1GiB", "jit"), ("1GiB", "eager"), ("min", "vmap")]
)
def test_gradients(budget, transformation):
    params, x = networks.stacked(networks.parameters()), networks.inputs()
    plan = networks.on_host(memjax.plan(networks.scanned_loss, params, x, budget=budget))
    assert plan.host_nbytes > 0
    assert "on the host" in str(plan)
    assert memjax.Plan.from_json(plan.to_json()) == plan
    f = jax.value_and_grad(memjax.planned(networks.scanned_loss, plan=plan))
    reference = jax.jit(jax.value_and_grad(networks.scanned_loss))
    if transformation == "vmap":
        f, reference = (jax.jit(jax.vmap(one, (None, 0))) for one in (f, reference))
        x = jnp.stack([x, 2 * x])
    found = (jax.jit(f) if transformation == "jit" else f)(params, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(reference(params, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_parts_of_a_loop_that_keep_differently():
    """Of the first turns nothing lies on the host, of the others what was kept of them."""
    params, x = networks.stacked(networks.parameters()), networks.inputs()
    plan = memjax.plan(networks.scanned_loss, params, x, budget="1GiB")
    [i] = [i for i, stretch in enumerate(plan.stretches) if stretch.turns is not None]
    turns = plan.stretches[i].turns
    first = plan.stretches[i]._replace(turns=1)
    second = networks.on_host(plan).stretches[i]._replace(turns=turns - 1, handed_on=0)
    mixed = dataclasses.replace(plan, stretches=(*plan.stretches[:i], first, second, *plan.stretches[i + 1 :]))
    found = jax.jit(jax.value_and_grad(memjax.planned(networks.scanned_loss, plan=mixed)))(params, x)
    expected = jax.value_and_grad(networks.scanned_loss)(params, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_a_choice_as_data_says_what_is_on_the_host():
    found = chain(scanned, *shapes())
    choices = found.choices(found.frontier[0][0])
    loop, last = [stretch for stretch in stretches(found, choices, Layout(())) if stretch.turns is not None]
    carried = 2 * 16384 * 4096
    assert (loop.turns, loop.host_nbytes) == (5, 5 * carried)
    assert loop.nbytes == loop.handed_on
    # Its carry is read at once, so that nothing is gained by moving it.
    assert (last.turns, last.host_nbytes, last.nbytes) == (1, 0, carried)


def test_a_plan_of_a_loop_that_returns_lent_memory_is_read_back():
    found = chain(scanned, *shapes())
    choices = [
        one._replace(option=one.option._replace(working=-1) if one.option.parts else one.option)
        for one in found.least_choices()
    ]
    assert {one.working_nbytes for one in stretches(found, choices, Layout(())) if one.turns} == {0}


@pytest.mark.usefixtures("x64")
def test_nothing_moves_on_cpus():
    params, x = networks.stacked(networks.parameters()), networks.inputs()
    for budget in ("min", "1GiB"):
        exact, plan = (memjax.plan(networks.scanned_loss, params, x, budget=budget, allow=a) for a in ([], ALLOW))
        assert plan.stretches == exact.stretches
        assert plan.notes
        assert plan.notes[0] in str(plan)
        assert not exact.notes


def test_a_refusal_says_what_moving_would_save():
    args = shapes()
    exact, moved = (chain(scanned, *args, offload=offload) for offload in (False, True))
    assert readable_bytes(moved.frontier[0][0]) in what_moving_saves(exact, moved, Layout(()))
    assert not what_moving_saves(exact, exact, Layout(()))
