"""Plans from outside: each change of a number in their JSON is refused, or leaves the gradient right."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from tests.plan import networks


def numbers(node, path=()):
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            yield from numbers(value, (*path, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, key), value


def changed(text, path, value):
    whole = json.loads(text)
    node = whole["stretches"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return json.dumps(whole)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("loss", "allow"),
    [(networks.unrolled_loss, "recompute"), (networks.scanned_loss, "compress")],
)
def test_a_changed_number_is_refused_or_changes_no_gradient(loss, allow):
    params, x = networks.parameters(layers=2), networks.inputs()
    params = networks.stacked(params) if loss is networks.scanned_loss else params
    text = memjax.plan(loss, params, x, budget="min", allow=("recompute", allow)).to_json()
    expected = jax.device_get(jax.jit(jax.grad(loss))(params, x))
    refused = 0
    spots = list(numbers(json.loads(text)["stretches"]))
    for i, (path, old) in enumerate(spots):
        value = (old + 1, 0, -5, 10**6)[i % 4] if isinstance(old, int) else -1.0
        try:
            plan = memjax.Plan.from_json(changed(text, path, value))
            got = jax.grad(memjax.planned(loss, plan=plan))(params, x)
        except ValueError as error:
            assert str(error).startswith(("plan must be what", "text must be what"))  # noqa: PT017
            refused += 1
        else:
            worst = lambda a, b: np.max(np.abs(a - b)) / np.max(np.abs(b))
            errors = jax.tree.leaves(jax.tree.map(worst, jax.device_get(got), expected))
            assert max(errors) < (1e-9 if allow == "recompute" else 0.1)
    assert refused > len(spots) / 4


@pytest.mark.parametrize(
    "field", ["stretches", "points", "tries", "tiled", "notes", "budget", "seconds", "program", "in_steps"]
)
def test_a_field_of_another_kind_is_refused(field):
    plan = memjax.plan(lambda x: jnp.sum(jnp.sin(x)), jnp.ones(3), budget="1GiB")
    for other in ([3], {}):
        with pytest.raises(ValueError, match=r"text must be what Plan\.to_json wrote"):
            memjax.Plan.from_json(json.dumps(json.loads(plan.to_json()) | {field: other}))


def test_the_bytes_of_a_loop_are_those_of_all_its_turns():
    params, x = networks.stacked(networks.parameters(jnp.float32)), networks.inputs(jnp.float32)
    plan = memjax.plan(networks.scanned_loss, params, x, budget="1GiB")
    [loop] = [stretch for stretch in plan.stretches if stretch.turns is not None]
    assert loop.turns == networks.LAYERS
    one_turn = sum(kept.nbytes for kept in loop.kept)
    assert one_turn >= x.nbytes
    assert loop.nbytes == loop.handed_on + networks.LAYERS * one_turn
    there = loop._replace(kept=tuple(kept._replace(on_host=True) for kept in loop.kept))
    assert (there.nbytes, there.host_nbytes) == (loop.handed_on, networks.LAYERS * one_turn)


def test_a_function_that_fails_for_the_shapes_is_named_with_them():
    with pytest.raises(TypeError, match=r"f must take arguments of .*float32\[3,4\].*dot_general"):
        memjax.plan(lambda w, x: jnp.sum(x @ w), np.ones((3, 4), np.float32), np.ones((5, 2), np.float32), budget="min")
