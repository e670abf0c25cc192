"""Plans: bytes of the compiled step against the budget, the frontier, plans as data, and errors."""

import functools
import json
import re
from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax._plan.budget.known import forget
from tests.plan.networks import (
    images,
    inputs,
    layer,
    parameters,
    resnet_loss,
    resnet_parameters,
    scanned_loss,
    stacked,
    unrolled_loss,
)

ROWS = 4096


def arguments(layers=4):
    return parameters(jnp.float32, layers), inputs(jnp.float32, ROWS)


def temp(f, *args):
    return jax.jit(jax.value_and_grad(f)).lower(*args).compile().memory_analysis().temp_size_in_bytes


CASES = {
    "layers": lambda: (unrolled_loss, *arguments(3)),
    "scan": lambda: (scanned_loss, stacked(arguments()[0]), arguments()[1]),
    "resnet": lambda: (resnet_loss, resnet_parameters(), images()),
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_bytes_keep_within_every_budget_and_never_fall_as_it_grows(case):
    loss, *args = CASES[case]()
    least, fastest = (memjax.plan(loss, *args, budget=budget).tries[0].compiled for budget in ("min", "1GiB"))
    assert least < 0.6 * temp(loss, *args)
    peaks, times = [], []
    for i in range(4):
        budget = least + (fastest - least) * i // 3
        plan = memjax.plan(loss, *args, budget=budget)
        assert plan.compiled_nbytes <= budget
        assert len(plan.tries) <= 5
        assert plan.compiled_nbytes in [one.compiled for one in plan.tries]
        peaks.append(plan.compiled_nbytes)
        times.append(plan.seconds)
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]
    assert temp(memjax.planned(loss, plan=plan), *args) == plan.compiled_nbytes


def test_a_large_budget_gives_the_step_as_it_is_where_that_moves_fewer_bytes():
    loss, *args = CASES["resnet"]()
    plain = temp(loss, *args)
    plan = memjax.plan(loss, *args, budget=plain)
    assert not plan.stretches
    assert "as without a plan" in str(plan)
    assert plan.compiled_nbytes == temp(memjax.planned(loss, plan=plan), *args) == plain
    assert memjax.Plan.from_json(plan.to_json()) == plan
    less = memjax.plan(loss, *args, budget=plain - 1)
    assert less.stretches
    assert less.compiled_nbytes < plain
    found = jax.jit(jax.value_and_grad(memjax.planned(loss, plan=plan)))(*args)
    chex.assert_trees_all_equal(*jax.device_get((found, jax.jit(jax.value_and_grad(loss))(*args))))


def test_constants_that_the_function_holds_are_constants_of_what_is_compiled():
    """The compiler computes with their values: indices that are never negative need no correction at run time."""
    order = np.random.default_rng(0).integers(0, 64, 1024)

    def loss(w, x):
        for _ in range(3):
            x = x + jax.ops.segment_sum(jnp.tanh(x[order] @ w), order[::-1], 64)
        return jnp.mean(x**2)

    args = jnp.eye(4) / 2, jnp.linspace(-1, 1, 256).reshape(64, 4)
    plan = memjax.plan(loss, *args, budget="min")
    assert temp(memjax.planned(loss, plan=plan), *args) == plan.compiled_nbytes


def test_a_plan_does_not_depend_on_what_was_planned_before():
    args = arguments(2)
    least, most = (memjax.plan(unrolled_loss, *args, budget=budget).compiled_nbytes for budget in ("min", "1GiB"))
    budgets = [least + (most - least) * i // 2 for i in range(3)]
    later = [memjax.plan(unrolled_loss, *args, budget=budget) for budget in budgets]
    for budget, plan in zip(budgets, later, strict=True):
        forget()
        assert memjax.plan(unrolled_loss, *args, budget=budget) == plan


def test_least_memory_is_no_more_than_a_checkpoint_a_layer():
    args = arguments()

    def by_hand(params, x):
        for p in params:
            x = jax.checkpoint(layer)(p, x)
        return jnp.mean(x**2)

    def scanned_by_hand(params, x):
        x, sums = jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(p, x), jnp.sum(x)), x, params)
        return jnp.mean(x**2) + 1e-3 * jnp.sum(sums)

    assert memjax.plan(unrolled_loss, *args, budget="min").compiled_nbytes <= temp(by_hand, *args) + 1024
    args = stacked(args[0]), args[1]
    assert memjax.plan(scanned_loss, *args, budget="min").compiled_nbytes <= temp(scanned_by_hand, *args) + 1024


def test_with_enough_memory_no_product_runs_again_and_with_little_one_of_each_layer():
    args = arguments(3)

    def products(f):
        return str(jax.make_jaxpr(jax.grad(f))(*args)).count("dot_general")

    plain = products(unrolled_loss)
    assert products(memjax.planned(unrolled_loss, budget="1GiB")) == plain
    # Of two products in a layer the second is read by nothing. What the last layer makes may be there when its turn begins.
    assert products(memjax.planned(unrolled_loss, budget="min")) in (plain + 2, plain + 3)


def test_layers_with_many_statistics_keep_what_a_policy_by_hand_keeps():
    """Two norms and a softmax have statistics of a few bytes: they take no place of a product among what may be kept."""
    examples, tokens, width, hidden = 8, 32, 64, 192
    norm = lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale

    def decoder(p, x):
        h = norm(x, p["norm1"])
        heads = lambda a: a.reshape(examples, tokens, -1, 16)
        attended = jax.nn.dot_product_attention(
            *(heads(h @ p[name]) for name in ("query", "key", "value")), is_causal=True
        )
        x = x + attended.reshape(x.shape) @ p["out"]
        h = norm(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss_with(decoder):
        return lambda params, x: jnp.mean(jax.lax.scan(lambda x, p: (decoder(p, x), None), x, params)[0] ** 2)

    def products(f):
        return str(jax.make_jaxpr(jax.grad(f))(*args)).count("dot_general")

    square = dict.fromkeys(("query", "out"), (width, width)) | dict.fromkeys(("key", "value"), (width, width // 2))
    wide = {
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
        "norm1": (width,),
        "norm2": (width,),
    }
    params = {name: jax.ShapeDtypeStruct((4, *size), jnp.float32) for name, size in (square | wide).items()}
    args = params, jax.ShapeDtypeStruct((examples, tokens, width), jnp.float32)
    plain, policy = loss_with(decoder), jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    by_hand = loss_with(jax.checkpoint(decoder, policy=policy))
    assert products(memjax.planned(plain, budget="1GiB", allow=("recompute",))) == products(plain)
    budget = temp(by_hand, *args)
    assert products(memjax.planned(plain, budget=budget, allow=("recompute",))) <= products(by_hand)


def test_a_plan_is_data():
    args = arguments(2)
    plan = memjax.plan(unrolled_loss, *args, budget="min", argnums=(0, 1))
    assert memjax.Plan.from_json(plan.to_json()) == plan
    assert plan == memjax.plan(unrolled_loss, *args, budget="min", argnums=(0, 1))
    assert plan != memjax.plan(unrolled_loss, *args, budget="1GiB", argnums=(0, 1))
    json.loads(plan.to_json())
    assert "equations from 0" in str(plan)
    points = plan.frontier()
    assert points == sorted(points)
    assert [point.seconds for point in points] == sorted((point.seconds for point in points), reverse=True)
    assert points[0].nbytes == plan.nbytes
    with pytest.raises(ValueError, match=r"text must be what Plan.to_json wrote"):
        memjax.Plan.from_json("{}")


def test_the_frontier_is_drawn(tmp_path):
    plan = memjax.plan(unrolled_loss, *arguments(2), budget="min")
    plan.plot(tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 1000


def test_plans_need_no_arrays():
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments(2))
    assert memjax.plan(unrolled_loss, *args, budget="min") == memjax.plan(unrolled_loss, *arguments(2), budget="min")


def test_too_small_a_budget_says_what_is_least_and_what_holds_it_up():
    args = arguments(2)
    least = memjax.plan(unrolled_loss, *args, budget="min")
    with pytest.raises(ValueError, match="but the least possible is") as error:
        memjax.plan(unrolled_loss, *args, budget=1000)
    said = re.search(r"the least possible is ([\d.]+ .?iB)", str(error.value))[1]
    assert memjax.plan(unrolled_loss, *args, budget=said).compiled_nbytes == least.compiled_nbytes
    assert "networks.py" in str(error.value)
    with pytest.raises(ValueError, match=f"the least possible is {least.compiled_nbytes:,} B"):
        memjax.plan(unrolled_loss, *args, budget=least.compiled_nbytes - 1)
    with pytest.raises(ValueError, match="but the least possible is"):
        jax.grad(memjax.planned(unrolled_loss, budget=1000))(*args)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memjax.plan(unrolled_loss, *arguments(1), budget="lots"), "budget must be a number of bytes"),
        (
            lambda: memjax.plan(unrolled_loss, *arguments(1), budget="min", allow="recompute"),
            "allow must be a sequence",
        ),
        (lambda: memjax.plan(unrolled_loss, *arguments(1), budget="min", allow=["magic"]), "allow must be one of"),
        (lambda: memjax.plan(unrolled_loss, *arguments(1), budget="min", argnums=2), "argnums must be positions among"),
        (lambda: memjax.plan(unrolled_loss, *arguments(1), budget="device"), "tells no limit of its memory"),
        (lambda: memjax.plan(lambda x: x, jnp.arange(3), budget="min"), "float arrays to differentiate"),
        (lambda: memjax.plan(3, budget="min"), "f must be a function"),
        (lambda: memjax.planned(unrolled_loss), "give exactly one of budget and plan"),
        (lambda: memjax.planned(unrolled_loss, plan="min"), "plan must be a Plan"),
        (lambda: memjax.planned(jnp.dot, budget="min")(jnp.ones(3), jnp.ones(4)), "f must take arguments of"),
        (lambda: memjax.plan(jnp.sum, jnp.ones(3), budget="1GiB").plot(3), "path must be a path"),
        (lambda: memjax.plan(jnp.sum, jnp.ones(3), budget="1GiB").plot(ax=3), "ax must be None or axes of matplotlib"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_plan_of_another_program_is_refused():
    plan = memjax.plan(unrolled_loss, *arguments(2), budget="min")
    with pytest.raises(ValueError, match="plan must be of the function"):
        jax.grad(memjax.planned(unrolled_loss, plan=plan))(*arguments(1))
    with pytest.raises(ValueError, match="the same argnums"):
        jax.grad(memjax.planned(unrolled_loss, plan=plan), (0, 1))(*arguments(2))


def test_a_function_that_is_not_differentiated_is_not_planned():
    args = arguments(1)
    planned = memjax.planned(unrolled_loss, budget=1)
    assert planned(*args) == unrolled_loss(*args)
    assert functools.wraps(unrolled_loss)(planned).__name__ == planned.__name__ == "unrolled_loss"


@pytest.mark.smoke
def test_a_kept_mask_is_kept_and_not_what_it_is_made_from():
    """The compiler would fuse the comparison into the mask's readers, and keep the product, eight times as large."""

    def loss(params, x):
        for w in params:
            x = jax.nn.relu(x @ w).reshape(*x.shape, -1).mean(-1)
        return jnp.sum(x**2)

    params, x = [jax.ShapeDtypeStruct((64, 1024), jnp.float32)] * 3, jax.ShapeDtypeStruct((512, 64), jnp.float32)
    plan = memjax.plan(loss, params, x, budget="7MiB")
    kept = [one for stretch in plan.stretches for one in stretch.kept]
    assert sum("bool[512,1024]" in one.what for one in kept) > 1
    assert plan.compiled_nbytes < 3 * 512 * 1024 * 4


def test_no_budget_takes_less_than_the_least():
    """A plan that is predicted to take more may take less when compiled, as between layers of unlike widths."""
    attention = lambda x: jax.nn.softmax(x @ x.T) @ x
    widths = (256, 16, 256, 64, 64, 128, 32)
    layers = (jnp.tanh, jax.nn.gelu, jax.nn.relu, attention, jax.nn.relu, jnp.tanh)
    weights = [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in pairwise(widths)]

    def loss(weights, x):
        total = 0.0
        for w, act in zip(weights, layers, strict=True):
            y = act(x @ w)
            x = x + y if x.shape == y.shape else y
            total = total + jnp.mean(x**2)
        return total

    args = weights, jax.ShapeDtypeStruct((512, 256), jnp.float32)
    least = memjax.plan(loss, *args, budget="min")
    assert least.nbytes == least.budget == least.compiled_nbytes
    assert memjax.plan(loss, *args, budget=least.nbytes).nbytes == least.nbytes
    for share in (0.995, 0.97, 0.9, 0.8):
        with pytest.raises(ValueError, match="but the least possible is"):
            memjax.plan(loss, *args, budget=int(share * least.nbytes))
