"""`Plan.as_policy`: a policy of `jax.checkpoint` that keeps the same arrays as the plan, or the reason why there is none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import memjax
from memjax._plan.result import Tiled

LAYERS, WIDTH, HIDDEN = 6, 64, 256
SIZES = {"up": (WIDTH, HIDDEN), "mix": (HIDDEN, HIDDEN), "down": (HIDDEN, WIDTH)}
RNG = np.random.default_rng(0)
WEIGHTS = jax.device_put({name: RNG.normal(size=(LAYERS, *size)) * size[0] ** -0.5 for name, size in SIZES.items()})
HEAD = jax.device_put(RNG.normal(size=(WIDTH, 4 * HIDDEN)) / 8)
X = jax.device_put(RNG.normal(size=(256, WIDTH)))


def layer(p, x):
    hidden = jnp.tanh(checkpoint_name(x @ p["up"], "up"))
    return checkpoint_name(x + jnp.sin(checkpoint_name(hidden @ p["mix"], "mixed")) @ p["down"], "stream")


def head(x):
    return jnp.sum(jnp.sin(checkpoint_name(x @ HEAD, "logits")) ** 2)


def scanned(layer, head=head):
    return lambda weights, x: head(jax.lax.scan(lambda x, p: (layer(p, x), None), x, weights)[0])


def unrolled(weights, x):
    for number in range(LAYERS):
        x = layer({name: stacked[number] for name, stacked in weights.items()}, x)
    return jnp.sum(x**2)


def by_layers(policy):
    return scanned(jax.checkpoint(layer, policy=policy, prevent_cse=False), jax.checkpoint(head, policy=policy))


def compiled(f):
    return jax.jit(jax.grad(f), compiler_options=memjax.remat_compiler_options()).lower(WEIGHTS, X).compile()


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("budget", "names"),
    [
        ("min", {"logits"}),
        ("4MiB", {"mixed", "logits"}),
    ],
)
def test_the_same_arrays_are_kept(budget, names):
    """Compiled bytes and gradients are those of the plan, and the bytes about half of the plain ones, or less."""
    f = scanned(layer)
    plan = memjax.plan(f, WEIGHTS, X, budget=budget)
    policy = memjax.Plan.from_json(plan.to_json()).as_policy()
    assert policy == plan.as_policy()
    assert policy.saved == names
    planned, other = (compiled(one) for one in (memjax.planned(f, plan=plan), by_layers(policy)))
    assert temporary(other) == pytest.approx(temporary(planned), rel=0.01)
    assert temporary(other) < 0.55 * temporary(compiled(f))
    for a, b in zip(*(jax.tree.leaves(program(WEIGHTS, X)) for program in (planned, other)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(a).max()))


def test_names_are_asked_for_where_a_plan_keeps_arrays_without_one():
    plan = memjax.plan(scanned(layer), WEIGHTS, X, budget="6MiB")
    with pytest.raises(ValueError, match=r"without a name \(float32\[256,256\] tanh test_as_policy.*checkpoint_name"):
        plan.as_policy()


def test_a_name_of_what_is_kept_and_of_what_is_not_is_refused():
    """Two of the six layers are in one stretch. The plan does not keep what is between these two."""
    with pytest.raises(ValueError, match="some arrays of the name 'stream' and not others"):
        memjax.plan(unrolled, WEIGHTS, X, budget="min").as_policy()


def test_schedules_are_refused():
    loss = lambda w, xs: jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((8, 64)), xs)[0] ** 2)
    plan = memjax.plan(loss, jnp.eye(64) / 2, jnp.ones((200, 8, 64)), budget="96KiB")
    with pytest.raises(ValueError, match="with a schedule: turns of a loop run again in blocks"):
        plan.as_policy()


def changed(plan, change):
    """Plans are data: one with other stretches."""
    return dataclasses.replace(plan, stretches=tuple(part for one in plan.stretches for part in change(one)))


def test_what_no_policy_says_is_refused():
    plan = memjax.plan(scanned(layer), WEIGHTS, X, budget="4MiB")
    coded = lambda one: [one._replace(kept=tuple(kept._replace(bits=8) for kept in one.kept))]
    split = lambda one: [one._replace(turns=2), one._replace(turns=4, kept=one.kept[:1])] if one.turns else [one]
    moved = lambda one: [one._replace(kept=tuple(kept._replace(on_host=True) for kept in one.kept))]
    tiled = Tiled(0, 0, 1, 2, 8, "")
    for one, reason in (
        (changed(plan, lambda _: []), "computes nothing again: leave jax.checkpoint out"),
        (changed(plan, coded), "in codes, which no policy makes"),
        (changed(plan, split), "some turns of a loop keep other arrays"),
        (dataclasses.replace(plan, in_steps=True), "large arrays one after another"),
        (dataclasses.replace(plan, stretches=(), tiled=(tiled,)), "tile by tile"),
    ):
        with pytest.raises(ValueError, match=reason):
            one.as_policy()
    assert changed(plan, moved).as_policy() == memjax.remat.policies.offload("mixed") | memjax.remat.policies.save(
        "logits"
    )
