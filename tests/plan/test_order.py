"""The orders that stand for a compiler's schedule."""

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core.program.dataflow import Dataflow
from memjax._core.program.working import peak_bytes
from memjax._plan.solve.order import as_compiled, freeing_first, in_time


def program(f, *shapes):
    return jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).jaxpr


def test_what_frees_memory_runs_first():
    def f(x, v, w):
        one, other = x @ v, x @ w  # 64 x 4096 each
        over_rows = lambda y: jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())))
        return over_rows(one), over_rows(other)

    jaxpr = program(f, (64, 8), (8, 4096), (8, 4096))
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    one, other, first, second = products
    order = freeing_first(Dataflow(jaxpr.eqns), jaxpr.outvars, [], "cuda").eqns
    assert sorted(map(id, order)) == sorted(map(id, jaxpr.eqns))
    assert [eqn for eqn in order if eqn in products] == [one, first, other, second]


def test_it_takes_less_than_the_order_of_the_program():
    """The derivative of a gated layer: one factor's cotangent is written over what is read for the last time."""

    def f(gate, up, ct):
        return (ct * jax.nn.silu(gate)) @ gate.T, (ct * up * jnp.cos(gate)) @ up.T

    jaxpr = program(f, *((64, 4096),) * 3)
    entering = jaxpr.invars
    peaks = [
        peak_bytes(order, [], entering, [], jaxpr.outvars, "cuda")
        for order in (jaxpr.eqns, freeing_first(Dataflow(jaxpr.eqns), jaxpr.outvars, [], "cuda"))
    ]
    assert peaks[1] <= peaks[0]


def test_what_runs_again_does_so_when_it_is_needed():
    jaxpr = program(lambda x: (jnp.sin(x), jnp.cos(x), jnp.tan(x)), (4,))
    first, second, last = jaxpr.eqns
    reader = program(lambda x: jnp.exp(x), (4,)).eqns[0]
    reads = lambda eqn: reader.replace(invars=list(eqn.outvars))
    backward = [reads(last), reads(first)]
    assert in_time([first, second, last], backward) == [last, backward[0], first, backward[1]]


def test_a_product_that_is_transposed_is_one_with_factors_swapped():
    """As gradients of weights are; not where something else reads the product, nor where XLA:CPU converts narrow floats."""

    def gradient(x, ct):
        return lax.dot_general(ct, x, (((0,), (0,)), ((), ()))).T

    jaxpr = program(gradient, (64, 8), (64, 16))
    [eqn] = as_compiled(jaxpr.eqns, "cpu")
    assert (eqn.primitive.name, eqn.outvars) == ("dot_general", jaxpr.outvars)
    assert peak_bytes([eqn], jaxpr.invars, [], [], jaxpr.outvars, "cpu") == 0
    both = lambda x, ct: (lambda y: (y.T, jnp.sin(y)))(ct.T @ x)
    for other in (
        program(both, (64, 8), (64, 16)),
        jax.make_jaxpr(gradient)(*2 * [jnp.ones((8, 8), jnp.bfloat16)]).jaxpr,
    ):
        assert as_compiled(other.eqns, "cpu") == other.eqns
