"""Chains within a budget: what of a block is kept, what that saves, and plans of chains as data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import memjax
from memjax.remat import ChainSchedule, chain, chain_costs, chain_plan, chain_schedule
from tests.remat.chain import chain_cases as cases
from tests.remat.chain.chain_cases import close, plain

BLOCKS, ROWS, WIDTH = 6, 256, 16
SLACK = 4096  # bytes of scalars and alignment


def uneven(p, x):
    """A value that takes many products and is small, as attention's is, and one that takes few and is wide."""
    small = checkpoint_name(jax.lax.stop_gradient(jax.nn.softmax(x @ x.T) @ x), "small")
    wide = checkpoint_name((x + small) @ p["up"], "wide")
    return x + jnp.tanh(wide) @ p["down"]


PRODUCTS_OF_SMALL = 2 * 2 * ROWS * ROWS * WIDTH
PRODUCTS_OF_WIDE = 2 * ROWS * WIDTH * 8 * WIDTH


def model(count=BLOCKS):
    rng = np.random.default_rng(0)
    draw = lambda *size: jax.device_put(rng.normal(size=size))
    params = [{"up": draw(WIDTH, 8 * WIDTH) * 0.1, "down": draw(8 * WIDTH, WIDTH) * 0.1} for _ in range(count)]
    return [uneven] * count, params, draw(ROWS, WIDTH)


def compiled(run, blocks, params, x, **options):
    """The gradient of a loss after the chain."""

    def loss(params, x):
        return (run(blocks, params, x, **options) ** 2).sum()

    quickly = {"xla_backend_optimization_level": 0}  # which changes no buffer
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile(compiler_options=quickly)


def temp(program):
    return program.memory_analysis().temp_size_in_bytes


def flops(program):
    return program.cost_analysis()["flops"]


@pytest.mark.usefixtures("x64")
def test_the_small_value_that_takes_long_is_kept_and_the_wide_one_is_not():
    arguments = _, params, x = model()
    everything = compiled(plain, *arguments)
    least = chain_plan(*arguments, budget="min").nbytes
    budget = (2 * least + temp(everything)) // 3
    found = compiled(chain, *arguments, budget=budget)
    assert temp(found) <= budget < temp(everything)
    close(found(params, x), everything(params, x), 1e-10)
    again = flops(found) - flops(everything)
    assert 0.9 * PRODUCTS_OF_WIDE < again < PRODUCTS_OF_SMALL
    # With two options for a block, all or nothing, some blocks compute what takes long again.
    two_options = chain_schedule(chain_costs(*arguments), budget)
    assert flops(compiled(chain, *arguments, schedule=two_options)) - flops(everything) > PRODUCTS_OF_SMALL


def test_no_policy_for_all_blocks_computes_less_in_the_same_memory():
    blocks, params, x = model(8)  # so that what is kept takes more than what one block works with
    policy = jax.checkpoint_policies.save_only_these_names("small")
    by_hand = compiled(plain, [jax.checkpoint(f, policy=policy) for f in blocks], params, x)
    found = compiled(chain, blocks, params, x, budget=temp(by_hand))
    assert temp(found) <= temp(by_hand)
    assert flops(found) <= 1.01 * flops(by_hand)


def test_a_plan_is_data_that_the_chain_acts_on():
    blocks, params, x = model(3)
    budget = 450_000
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x))
    plan = chain_plan(blocks, *shapes, budget=budget)
    assert isinstance(plan, memjax.Plan)
    assert plan.stretches
    assert memjax.Plan.from_json(plan.to_json()) == plan
    acting = compiled(chain, blocks, params, x, schedule=plan)
    assert temp(acting) == temp(compiled(chain, blocks, params, x, budget=budget))
    assert temp(acting) <= budget
    with pytest.raises(ValueError, match=r"^schedule must be of these blocks.*chain_plan\(blocks, params, x, budget"):
        jax.grad(lambda x: chain(blocks[1:], params[1:], x, schedule=plan).sum())(x)
    with pytest.raises(ValueError, match=r"^argnums must be 0 .params., 1 .x., or both, got 2"):
        chain_plan(blocks, *shapes, budget=budget, argnums=2)
    with pytest.raises(ValueError, match=r"^argnums must choose float arrays.*: x has none"):
        chain_plan([lambda p, i: p[i]], [x], jnp.arange(3), budget=budget, argnums=1)


def looping(p, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0]


@pytest.mark.usefixtures("x64")
def test_a_plan_serves_a_chain_of_which_less_is_differentiated():
    """With data as input, and with frozen blocks: a loop before all others, or some in the middle."""
    blocks, params, x = model(4)
    blocks, params = [looping, *blocks], [jnp.stack([jnp.eye(WIDTH)] * 3), *params]

    def gradient(run, **options):
        def loss(trained, x):
            return (run(blocks, [trained.get(i, p) for i, p in enumerate(params)], x, **options) ** 2).sum()

        return jax.jit(jax.grad(loss))

    plans = [chain_plan(blocks, params, x, budget=1_000_000, argnums=argnums) for argnums in ((0, 1), 0)]
    for numbers, of_numbers in ((range(5), plans[:1]), ((1, 3), plans[1:]), ((4,), plans)):
        trained = {number: params[number] for number in numbers}
        want = gradient(plain)(trained, x)
        for plan in of_numbers:
            found = gradient(chain, schedule=plan)
            close(found(trained, x), want, 1e-10)
            assert memjax.measure(found, trained, x).temp_bytes <= plan.nbytes + x.nbytes + SLACK  # of the loss
    with pytest.raises(ValueError, match=r"got one of chain_plan\(..., argnums=\(0,\)\)"):
        jax.grad(lambda x: chain(blocks, params, x, schedule=plans[1]).sum())(x)
    assert (
        memjax.measure(found, trained, x).residual_bytes < 3 * 4 * x.nbytes
    )  # nothing of the loop, nor of blocks before
    # The last block's gradient alone needs nothing of the others again.
    everything = memjax.measure(gradient(plain), trained, x).flops
    assert memjax.measure(found, trained, x).flops < 1.1 * everything


def test_groups_within_groups_where_no_plan_is_as_small():
    """Each block is as large as what its backward pass works with, so that inputs are what takes the memory."""
    count, n = 12, 4096
    blocks, params, x = [lambda p, x: jnp.sin(x * p)] * count, [jnp.float32(1.1)] * count, jnp.ones(n)
    least = chain_plan(blocks, params, x, budget="min")
    assert isinstance(least, ChainSchedule)
    assert least.nbytes < count * 4 * n / 2
    found, everything = compiled(chain, blocks, params, x, budget=least.nbytes), compiled(plain, blocks, params, x)
    assert temp(found) <= least.nbytes + SLACK
    close(found(params, x), everything(params, x), 1e-4)


def test_plans_outlive_what_is_around_them():
    """An outer plan sees the chain's own; its blocks are no harm to it."""
    blocks, params, x = cases.mlps(count=3, batch=256)

    def loss(run, params, **options):
        return (run(blocks, params, x, **options) ** 2).sum()

    outer = memjax.planned(lambda params: loss(chain, params, budget="1GiB"), budget="min")
    close(jax.jit(jax.grad(outer))(params), jax.jit(jax.grad(lambda params: loss(plain, params)))(params), 1e-4)
