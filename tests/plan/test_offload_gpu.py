"""What loops move to the host on a GPU: the gradients without, turn for turn, and what it frees.

XLA:GPU once read such values in the wrong order in the backward pass, without a word, so layers differ in their weights, and
each gradient is compared.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import memjax
from tests.plan import networks

pytestmark = pytest.mark.gpu

ALLOW = ("recompute", "offload")
LAYERS = 5


def scanned(params, x, reverse):
    x, _ = jax.lax.scan(lambda x, p: (networks.layer(p, x), None), x, params, reverse=reverse)
    return jnp.mean(x**2)


def arguments(rows):
    return networks.stacked(networks.parameters(jnp.float32, LAYERS)), networks.inputs(jnp.float32, rows)


def largest_difference(found, expected):
    return max(
        jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), found, expected))
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("rows", [8, 65536])
def test_gradients_are_those_without(rows, in_parts, reverse):
    with jax.default_matmul_precision("highest"):  # a plan is of one program, precisions included
        compare(lambda *args: scanned(*args, reverse), arguments(rows), in_parts)


def compare(f, args, in_parts):
    plan = memjax.plan(f, *args, budget="min")
    moved = networks.on_host(plan)
    if in_parts:
        [i] = [i for i, stretch in enumerate(plan.stretches) if stretch.turns is not None]
        first = plan.stretches[i]._replace(turns=2)
        second = moved.stretches[i]._replace(turns=LAYERS - 2, handed_on=0)
        moved = dataclasses.replace(plan, stretches=(*plan.stretches[:i], first, second, *plan.stretches[i + 1 :]))
    step = lambda plan: jax.jit(jax.value_and_grad(memjax.planned(f, plan=plan)))(*args)
    assert largest_difference(step(moved), step(plan)) < 1e-5


def test_a_plan_that_moves_fits_where_none_did():
    f, args = lambda *args: scanned(*args, False), arguments(1 << 20)
    exact, moved = (memjax.plan(f, *args, budget="min", allow=allow) for allow in (("recompute",), ALLOW))
    assert moved.host_nbytes > 0
    assert moved.compiled_nbytes < 0.8 * exact.compiled_nbytes
    assert memjax.plan(f, *args, budget=moved.compiled_nbytes, allow=ALLOW).compiled_nbytes <= moved.compiled_nbytes
