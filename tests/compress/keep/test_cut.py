"""The cut that decides what is kept: against exhaustive search, and what it knows of the backward pass."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memjax._core.backward import minimum_cut
from memjax._core.backward.minimum_cut import Graph, cheapest
from memjax._core.program.costs import array_bytes
from memjax._core.program.dataflow import variables
from memjax._core.program.jaxpr import calls_in_place
from memjax._plan.solve.subsets import Problem, kept_at_prices
from memjax.compress._transform.keep.needs import Need, needs
from tests.compress.transformer_layers import by_a_rule_of_its_own

_AGAIN = {"sin": 1, "mul": 2, "add": 1, "tanh": 3, "split": 6, "dot_general": None}


def _programs():
    x, w = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)

    def gated(x, w):
        a, b = x @ w, w @ x
        s = jnp.sin(a)
        return a, s, s * b, jnp.tanh(b), x

    def shared(x, w):
        a = x @ w
        b = jnp.sin(a)
        c, d = b * b, jnp.tanh(b)
        return c + d, c * a, d

    def residual(x, w):
        a = x + x @ w
        b = jnp.tanh(a)
        return a, b, b + jnp.sin(b @ w), b * a

    def several(x, w):
        a, b = jnp.split(jnp.sin(x @ w), 2)
        c, d = jnp.split(x @ w, 2)
        return a, b, c * d, c, d

    return [calls_in_place(jax.make_jaxpr(f)(x, w), differentiable=False) for f in (gated, shared, residual, several)]


@pytest.mark.parametrize("program", range(4))
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_cheaper(monkeypatch, program, seed):
    program, rng = _programs()[program], np.random.default_rng(seed)
    producer = program.flow.makers
    values = [*program.invars, *(var for eqn in program.eqns for var in eqn.outvars)]
    nbytes = dict(zip(values, rng.integers(1, 9, len(values)).tolist(), strict=True))
    again = lambda eqn: _AGAIN[eqn.primitive.name]
    wanted = [var for var in variables(program.outvars) if rng.random() < 0.8]

    def cost(kept):
        """Of keeping these and running again what is missing; None if that cannot be."""
        there, total, pending = set(kept), sum(nbytes[var] for var in kept), list(wanted)
        while pending:
            if (var := pending.pop()) in there:
                continue
            if var not in producer or again(producer[var]) is None:
                return None
            there.update(producer[var].outvars)
            total += again(producer[var])
            pending += variables(producer[var].invars)
        return total

    subsets = itertools.chain.from_iterable(itertools.combinations(values, n) for n in range(len(values) + 1))
    least = min(found for subset in subsets if (found := cost(subset)) is not None)
    late, early = (cheapest(wanted, producer, set(), nbytes.__getitem__, again, late=late) for late in (True, False))
    assert cost(late) == cost(early) == least
    monkeypatch.setattr(minimum_cut, "_FEW", 0)  # by SciPy, as graphs of many edges
    assert cheapest(wanted, producer, set(), nbytes.__getitem__, again) == late
    assert cheapest(wanted, producer, set(), nbytes.__getitem__, again, late=False) == early


@pytest.mark.parametrize("program", range(4))
def test_cuts_at_many_prices_are_those_at_each(program):
    program = _programs()[program]
    flow, rng = program.flow, np.random.default_rng(0)
    seconds = {id(eqn): float(rng.integers(1, 9)) for eqn in program.eqns}
    to_keep = {var: float(rng.integers(0, 3)) for var in (*program.invars, *flow.place)}
    known = {*program.invars}
    problem = Problem(flow, variables(program.outvars), known, seconds, to_keep.__getitem__, None, flow.names)
    graph = Graph(problem.wanted, flow.makers, known, lambda eqn: True)
    cost = lambda price: lambda var: price * array_bytes(var) + to_keep[var]
    found = kept_at_prices(problem)
    assert found == [graph.cheapest(cost(price), problem.to_rerun) for price in problem.prices()]
    assert len({tuple(kept) for kept in found}) > 1


def _need(f, *types):
    """The need of each array that the backward pass of `f` reads, by its number of values."""
    outs, trees = [], []

    def forward(*args):
        out, pullback = jax.vjp(f, *args)
        leaves, tree = jax.tree.flatten(pullback)
        outs.append(jax.typeof(out))
        trees.append(tree)
        return leaves

    residuals = jax.eval_shape(forward, *types)
    pullback = lambda residuals, ct: jax.tree.unflatten(trees[0], residuals)(ct)
    program = calls_in_place(jax.make_jaxpr(pullback)(residuals, outs[0]), differentiable=False)
    by_shape: dict[tuple[int, ...], Need] = {}
    for var, need in needs(program, program.invars[:-1], program.invars[-1:]).items():
        by_shape[var.aval.shape] = max(need, by_shape.get(var.aval.shape, Need.COARSE))
    return by_shape


def test_attention_needs_what_its_log_sum_exp_agrees_with():
    query, key, value = (jax.ShapeDtypeStruct((1, 8, 2, d), jnp.float32) for d in (4, 4, 6))
    found = _need(by_a_rule_of_its_own, query, key, value)
    assert found[1, 8, 2, 4] == Need.EXACT
    assert found[1, 2, 8] == Need.EXACT
    assert found[1, 8, 2, 6] == Need.FINE  # values, and the output


def test_products_and_bounded_derivatives_need_little():
    x, w = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((4, 3), jnp.float32)
    assert set(_need(lambda x, w: jnp.tanh(x @ w), x, w).values()) == {Need.COARSE}
    once = lambda x, w: jax.checkpoint(lambda x, w: jax.nn.softmax(x @ w))(x, w)
    assert _need(once, x, w)[8, 4] == Need.EXACT  # the weights are a source beside it: nothing says that they are exact


def test_divisors_need_to_be_exact():
    x, y = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert _need(lambda x, y: x / y, x, y) == {(8, 4): Need.EXACT}


def test_needs_inside_loops():
    """A carry that meets two residuals in an exponential, one of them in the turn before."""

    @jax.custom_vjp
    def f(x, y):
        return x * y

    def backward(saved, ct):
        x, y = saved
        total = lax.scan(lambda carry, x: (x, jnp.exp(carry + x)), y, x)[1]
        return ct * total, ct[0] * y

    f.defvjp(lambda x, y: (x * y, (x, y)), backward)
    x, y = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
    assert _need(f, x, y) == {(8, 4): Need.EXACT, (4,): Need.EXACT}
