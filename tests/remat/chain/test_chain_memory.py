"""Bytes of compiled gradients of chains: the budget is kept, and used; and what compiling costs."""

import jax
import jax.numpy as jnp
import pytest

from memjax._core.program.jaxpr import calls_in_place
from memjax.remat import chain, chain_costs, chain_plan, chain_schedule
from memjax.remat._chain.block import modelled_bytes
from tests.remat.chain import chain_cases as cases
from tests.remat.chain.chain_cases import plain

SLACK = 4096  # bytes of scalars and alignment


def compiled(run, blocks, params, x, **options):
    def loss(params):
        return (run(blocks, params, x, **options) ** 2).sum()

    quickly = {"xla_backend_optimization_level": 0}  # which changes no buffer
    return jax.jit(jax.value_and_grad(loss)).lower(params).compile(compiler_options=quickly)


def temp(*arguments, **options):
    return compiled(*arguments, **options).memory_analysis().temp_size_in_bytes


# Arguments and gradients are small beside activations, as gradients' own buffers can serve as working memory.
MODELS = {
    "mlp": lambda: cases.mlps(count=12, batch=1024),
    "convolution": lambda: cases.convolutions((8, 8, 16), size=32, batch=4),
    "transformer": lambda: cases.transformers(count=2, width=64, length=64),
}


@pytest.mark.parametrize(
    ("name", "is_planned"),
    [("transformer", True), ("convolution", False)],
)
def test_compiled_bytes_keep_within_the_budget(name, is_planned):
    blocks, params, x = MODELS[name]()
    without = temp(plain, blocks, params, x)
    if is_planned:
        # Which differentiates the input as well.
        options, least, everything = {}, chain_plan(blocks, params, x, budget="min").nbytes + SLACK, without
    else:
        options = {"costs": chain_costs(blocks, params, x)}
        least, everything = (chain_schedule(options["costs"], budget).nbytes for budget in ("min", 1 << 40))
    found = []
    for share in (0.0, 1.0):
        budget = int(least + share * (everything - least))
        found.append(temp(chain, blocks, params, x, budget=budget, **options))
        assert found[-1] <= budget + SLACK
    assert found[0] < found[1]
    assert found[1] > 0.6 * everything
    assert found[1] <= without


def test_keeping_inputs_alone_takes_a_fraction_of_plain():
    blocks, params, x = cases.mlps(count=12, batch=1024)
    everything, least = temp(plain, blocks, params, x), temp(chain, blocks, params, x, budget="1MiB")
    assert least <= (1 << 20) + SLACK
    assert least < 0.2 * everything


@pytest.mark.smoke
def test_converted_parameters_are_not_kept():
    """Without a barrier on parameters too, what is computed from them stays from the forward to the backward pass."""

    def block(p, x):
        return x + jnp.tanh(x @ jnp.sin(p))

    width, count = 128, 10
    blocks, params, x = [block] * count, [jnp.ones((width, width))] * count, jnp.ones((8, width))
    params = [p + i for i, p in enumerate(params)]
    assert temp(chain, blocks, params, x, budget="400KiB") < 5 * width * width * 4 < count * width * width * 4


def test_equal_blocks_are_lowered_once():
    """So compilers get no more to do than from plain autodiff, though blocks are computed again."""
    blocks, params, x = cases.transformers(count=5)
    schedule = chain_schedule(chain_costs(blocks, params, x), 85_000)
    assert schedule.seconds > 1.2 * schedule.plain_seconds

    def lines(run, **options):
        lowered = jax.jit(jax.grad(lambda params: run(blocks, params, x, **options))).lower(params)
        return len(lowered.as_text().splitlines())

    assert lines(chain, schedule=schedule) < lines(plain)


@pytest.mark.parametrize("name", ["mlp", "convolution"])
def test_the_model_for_programs_that_cannot_be_compiled_alone(name):
    """Within a factor of two and a half of the compiler."""
    for f, p, x in _steps(*MODELS[name]()):

        def gradient(p, x, ct, f=f):
            return jax.vjp(f, p, x)[1](ct)

        floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves((p, x)))
        if floats:
            traced = jax.jit(gradient).trace(p, x, jax.eval_shape(f, p, x))
            program = calls_in_place(traced.jaxpr, differentiable=False)
            real = traced.lower().compile().memory_analysis().temp_size_in_bytes
            modelled = modelled_bytes(program, "cpu")
            assert modelled < 2.5 * real + SLACK
            assert modelled > real / 2.5 - SLACK


def _steps(blocks, params, x):
    seen = set()
    for f, p in zip(blocks, params, strict=True):
        key = (f, str(jax.tree.map(jnp.shape, (p, x))))
        if key not in seen:
            yield f, p, x
        seen.add(key)
        x = f(p, x)
