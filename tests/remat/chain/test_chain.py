"""`remat.chain` against the blocks one after the other: values, gradients of every order, and the whole contract."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.remat import BlockCost, ChainSchedule, chain, chain_costs, schedule
from tests.remat.chain import chain_cases as cases
from tests.remat.chain.chain_cases import close, plain


def items(*items):
    """A schedule of these items, whatever it costs."""
    return ChainSchedule(items, 0.0, 0, 0.0, 0)


SCHEDULES = {
    "kept": items(0, 1, 2, 3, 4, 5),
    "nested": items((0, (1, (2,), 3), 4), 5),
    "mixed": items(0, (1, 2), 3, ((4,), 5)),
}


def gradients(run, blocks, params, x, **options):
    def loss(params, x):
        y = run(blocks, params, x, **options)
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(y) if jnp.issubdtype(leaf.dtype, jnp.inexact))

    return quick(jax.value_and_grad(loss, argnums=(0, 1), allow_int=True))(params, x)


def quick(f):
    """`jax.jit` that optimises no machine code."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("model", "name"), [*((cases.mlps, name) for name in SCHEDULES), (cases.convolutions, "mixed")]
)
def test_gradients(model, name):
    arguments = model()
    close(gradients(chain, *arguments, schedule=SCHEDULES[name]), gradients(plain, *arguments))


def test_equal_blocks_are_traced_once_and_not_again_to_recompute():
    blocks, params, x = cases.mlps()
    traced = []

    def counted(p, x):
        traced.append(1)
        return blocks[0](p, x)

    jax.jit(jax.grad(lambda p: chain([counted] * 6, p, x, schedule=SCHEDULES["nested"]).sum()))(params)
    assert len(traced) == 1


def counting(counts):
    def block(p, x):
        jax.debug.callback(lambda i: counts.__setitem__(int(i), counts.get(int(i), 0) + 1), p["i"])
        return jnp.sin(x * p["w"])

    return block


def test_each_block_runs_as_often_as_the_schedule_says():
    counts: dict[int, int] = {}
    params = [{"i": jnp.int32(i), "w": jnp.float32(i + 1)} for i in range(6)]

    def loss(ws):
        full = [{**p, "w": w} for p, w in zip(params, ws, strict=True)]
        return chain([counting(counts)] * 6, full, jnp.ones(3), schedule=SCHEDULES["nested"]).sum()

    jax.block_until_ready(jax.jit(jax.grad(loss))([p["w"] for p in params]))
    jax.effects_barrier()
    # items (0, (1, (2,), 3), 4), 5: all once; 0 to 4 again for the outer group, 1 to 3 again, 2 again.
    assert counts == {0: 2, 1: 3, 2: 4, 3: 3, 4: 2, 5: 1}


WAY = {"schedule": SCHEDULES["nested"]}


@pytest.mark.usefixtures("x64")
class TestTransforms:
    def test_forward_over_reverse(self):
        blocks, params, x = cases.mlps()

        def product(run, **options):
            gradient = jax.grad(lambda x: (run(blocks, params, x, **options) ** 3).sum())
            return jax.jit(lambda x: jax.jvp(gradient, (x,), (jnp.ones_like(x),))[1])(x)

        close(product(chain, **WAY), product(plain), 1e-11)

    def test_dropout_keys_integers_and_pairs(self):
        """Leaves that carry no gradient, in parameters and state; a structure that changes on the way."""

        def first(p, x):
            return {"h": x, "n": jnp.int32(0), "mask": jnp.ones_like(x)}

        def middle(p, state):
            keep = jax.random.bernoulli(p["key"], 0.7, state["h"].shape)
            h = jnp.where(keep, jnp.tanh(state["h"] @ p["w"]), 0) * state["mask"] + p["table"][state["n"]]
            return {**state, "h": h, "n": state["n"] + p["step"]}

        def final(p, state):
            return state["h"], state["n"]

        _, _, x = cases.mlps()
        params = [{}]
        for i in range(4):
            w = jax.random.normal(jax.random.key(i), (8, 8))
            params.append({"key": jax.random.key(i), "w": w, "table": jnp.arange(5.0), "step": i % 2})
        params.append(None)
        blocks = [first, *[middle] * 4, final]

        def gradient(run, **options):
            def loss(ws, x):
                full = [p if not p else {**p, "w": w} for p, w in zip(params, [None, *ws, None], strict=True)]
                h, n = run(blocks, full, x, **options)
                return (h**2).sum() * n.astype(h.dtype)

            return quick(jax.value_and_grad(loss, argnums=(0, 1)))([p["w"] for p in params[1:-1]], x)

        close(gradient(chain, **WAY), gradient(plain))

    def test_what_blocks_close_over_is_differentiated(self):
        _, params, x = cases.mlps()

        def gradient(run, **options):
            def loss(scale, params):
                blocks = [lambda p, x: cases.mlp(p, x) * scale] * 3 + [lambda p, x: x + scale * p["up"][0, 0]] * 3
                return (run(blocks, params, x, **options) ** 2).sum()

            return quick(jax.grad(loss, argnums=(0, 1)))(jnp.float64(1.1), params)

        close(gradient(chain, **WAY), gradient(plain))

    def test_aux_leaves_the_chain_without_gradient(self):
        blocks, params, x = cases.mlps()
        with_aux = [lambda p, x: (cases.mlp(p, x), {"mean": x.mean(), "n": x.size})] * 6

        def loss(params):
            y, aux = chain(with_aux, params, x, **WAY, has_aux=True)
            return (y**2).sum() + 100 * sum(a["mean"] for a in aux), aux

        (_, aux), found = quick(jax.value_and_grad(loss, has_aux=True))(params)
        close(found, gradients(plain, blocks, params, x)[1][0])
        means = lambda params: [plain(blocks[:i], params[:i], x).mean() for i in range(6)]
        close([a["mean"] for a in aux], quick(means)(params))


def test_frozen_parameters_cost_no_arithmetic():
    blocks, params, x = cases.mlps(width=16, batch=32)

    def flops(run, **options):
        trained = lambda first: (run(blocks, [first, *params[1:]], x, **options) ** 2).sum()
        found = quick(jax.grad(trained)).lower(params[0]).compile()
        return found(params[0]), found.cost_analysis()["flops"]

    gradient, ours = flops(chain, schedule=SCHEDULES["kept"])
    expected, plainly = flops(plain)
    close(gradient, expected, 1e-5)
    assert ours < 1.05 * plainly  # elementwise values are computed again


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({}, ValueError, "exactly one of budget and schedule"),
        ({"budget": 1, "schedule": SCHEDULES["kept"]}, ValueError, "exactly one of budget and schedule"),
        ({"budget": "12 gigs"}, ValueError, "budget must be a number of bytes or a text"),
        ({"budget": 1, "params": []}, ValueError, "params must have one entry per block, got 0 for 6 blocks"),
        ({"budget": 1, "blocks": [], "params": []}, ValueError, "blocks must have at least one function, got none"),
        ({"schedule": items(0, 1)}, ValueError, "schedule must be of 6 blocks in order"),
        ({"schedule": items(1, 0, 2, 3, 4, 5)}, ValueError, "schedule must be of 6 blocks in order"),
        (
            {"budget": 1, "costs": [BlockCost(1, 1, 1, 1)]},
            ValueError,
            "costs must have one entry per block, got 1 for 6",
        ),
        ({"budget": "infGiB"}, ValueError, "budget must be a number of bytes"),
        ({"budget": float("nan")}, ValueError, "budget must be a number of bytes"),
        ({"budget": b"1MiB"}, TypeError, "budget must be a number of bytes"),
        ({"schedule": schedule(6, 2)}, TypeError, "schedule must be a Plan or a ChainSchedule, got Schedule"),
        ({"budget": 1, "blocks": [3] * 6}, TypeError, r"blocks\[0\] must be a function, got 3"),
        ({"budget": 1, "blocks": None}, TypeError, "blocks must be a sequence of functions"),
        ({"budget": 1, "params": ["a"] * 6}, TypeError, r"params\[0\] must be an array or a number, got 'a'"),
        ({"budget": 1, "x": "abc"}, TypeError, "x must be an array or a number, got 'abc'"),
        ({"budget": 1, "costs": [1] * 6}, TypeError, r"costs\[0\] must be a BlockCost"),
        ({"budget": 1, "has_aux": "yes"}, TypeError, "has_aux must be True or False, got 'yes'"),
        ({"schedule": SCHEDULES["kept"], "costs": []}, ValueError, "costs decide what fits a budget"),
        ({"schedule": SCHEDULES["kept"], "has_aux": True}, TypeError, r"each block must return a pair \(y, aux\)"),
    ],
)
def test_bad_arguments(change, error, said):
    blocks, params, x = cases.mlps()
    arguments = {"blocks": blocks, "params": params, "x": x} | change
    with pytest.raises(error, match=said):
        chain(**arguments)


def test_a_budget_that_is_too_small_is_refused_when_the_chain_is_differentiated():
    blocks, params, x = cases.mlps()
    expected = quick(functools.partial(plain, blocks))(params, x)
    close(chain(blocks, params, x, budget=1), expected, 1e-5)  # which keeps nothing
    said = r"budget is 1 B, but the least possible is [\d.]+ KiB, at [\d.]+ of the time"
    with pytest.raises(ValueError, match=said):
        jax.grad(lambda x: chain(blocks, params, x, budget=1).sum())(x)


def test_a_block_that_cannot_be_traced_is_named():
    blocks, params, _ = cases.mlps(width=4)
    with pytest.raises(
        TypeError, match=r"blocks\[0\] must take params\[0\] of .* and an input of float32\[2,7\], got .*dot_general"
    ):
        chain(blocks, params, jnp.ones((2, 7), jnp.float32), budget="1MiB")


def test_nothing_traced_stays_alive():
    """Blocks may close over large constants, also of a gradient that has run."""

    def once():
        big = jnp.ones((256, 256))

        def block(p, x):
            return jnp.tanh(x @ p) + big[0, 0] + big.sum() * 0

        def loss(p, budget):
            return chain([block] * 3, [p] * 3, jnp.ones((4, 8)), budget=budget).sum()

        gradient = jax.jit(jax.grad(lambda p: loss(p, "min")))
        gradient(jnp.eye(8))
        gradient.clear_cache()
        return weakref.ref(big)

    big = once()
    gc.collect()
    assert big() is None


def test_measured_costs_have_the_bytes_of_estimated_ones():
    blocks, params, x = cases.mlps(width=32, batch=64)
    wide = {"up": jnp.ones((32, 1024)), "inner": jnp.ones(1024), "down": jnp.ones((1024, 32)), "outer": jnp.ones(32)}
    params = [*params[:-1], wide]
    estimated, measured = (chain_costs(blocks, params, x, measure=measure) for measure in (False, True))
    for a, b in zip(estimated, measured, strict=True):
        assert (a.output, a.kept) == (b.output, b.kept)
        assert a.forward_work <= 2 * b.forward_work + 4096
    assert measured[1] == measured[2]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in measured)
    assert measured[-1].backward_work > 1.5 * measured[1].backward_work
    assert chain(blocks, params, x, budget="1.2MiB", costs=measured).shape == x.shape
    with pytest.raises(TypeError, match="outside jit"):
        quick(lambda x: chain_costs(blocks, params, x, measure=True)[0].forward)(x)
    with pytest.raises(TypeError, match="outside jit"):
        chain_costs(blocks, params, jax.ShapeDtypeStruct(x.shape, x.dtype), measure=True)


def test_costs_of_a_matrix_product():
    """f(p, x) = sin(x @ p): keeps the product; two more products backwards."""
    cost, _ = chain_costs([lambda p, x: jnp.sin(x @ p)] * 2, [jnp.zeros((64, 64))] * 2, jnp.zeros((32, 64)))
    assert cost.output == 32 * 64 * 4
    assert cost.kept == 2 * 32 * 64 * 4
    assert 1.5 < cost.backward / cost.forward < 4


def test_leaves_of_the_input_that_are_handed_on_cost_nothing():
    mask = jnp.ones((100, 100))
    handing = [lambda p, state: (jnp.sin(state[0] * p), state[1])] * 3
    for cost in chain_costs(handing, [jnp.float32(2)] * 3, (jnp.ones(10), mask)):
        assert cost.output == 40
        assert cost.kept <= 80
    made = [lambda p, x: (x * p, jnp.tile(x, (100, 10))), *handing[:2]]
    costs = chain_costs(made, [jnp.float32(2)] * 3, jnp.ones(10))
    assert [cost.output for cost in costs] == [40040] * 3
    assert all(40040 <= cost.kept <= 40080 for cost in costs)  # the output included, what is handed on, too


def test_costs_leave_parameters_out():
    blocks, params, x = cases.mlps(batch=2)
    assert all(cost.kept < 2 * 8 * 5 * 4 * 2 for cost in chain_costs(blocks, params, x))
    expected = quick(functools.partial(plain, blocks))(params, x)
    np.testing.assert_allclose(chain(blocks, params, x, budget="1MiB"), expected, rtol=1e-5, atol=1e-6)


def test_inputs_are_not_copied():
    """Outside jit the backward pass reads the arrays that it was given."""
    blocks, params, x = cases.mlps()
    _, vjp = jax.vjp(lambda params, x: chain(blocks, params, x, schedule=SCHEDULES["kept"]), params, x)
    held = [leaf for leaf in jax.tree.leaves(vjp) if isinstance(leaf, jax.Array)]
    for leaf in jax.tree.leaves((params, x)):
        same = [value for value in held if value.shape == leaf.shape and np.array_equal(value, leaf)]
        assert same
        assert all(value is leaf for value in same)


@pytest.mark.parametrize("name", ["params", "x"])
def test_types_are_no_arrays(name):
    values = {"params": [jnp.ones((8, 8))], "x": jnp.ones((4, 8))}
    values[name] = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), values[name])
    with pytest.raises(TypeError, match=f"^{name} must be arrays, .*chain_plan takes types"):
        chain([lambda p, x: x @ p], **values, budget="1GiB")
