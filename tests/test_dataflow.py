"""What depends on what in a program: against what a few equations say."""

import jax
import jax.numpy as jnp

from memjax._core.program.dataflow import Dataflow, aliases, made_by, read_by, renamed


def flow_of(f, *args):
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return jaxpr, Dataflow(jaxpr.eqns)


def names(eqns):
    return [eqn.primitive.name for eqn in eqns]


def f(x, y):
    """sin, cos of that, exp of another input, the product of the two, and a sum that nothing reads."""
    low = jnp.cos(jnp.sin(x))
    product = low * jnp.exp(y)
    jnp.sum(y)
    return product, low


def test_who_makes_and_reads_what():
    jaxpr, flow = flow_of(f, jnp.ones(3), jnp.ones(3))
    (x, y), (product, low) = jaxpr.invars, jaxpr.outvars
    number = {name: i for i, name in enumerate(names(jaxpr.eqns))}
    assert {var: jaxpr.eqns[i] for var, i in flow.place.items()} == flow.makers
    assert flow.place[product] == number["mul"]
    assert flow.makers[low].primitive.name == "cos"
    assert x not in flow.makers
    assert list(flow.outside) == [x, y]
    assert flow.readers[y] == [number["exp"], number["reduce_sum"]]
    assert (flow.last_reader(y), flow.last_reader(product)) == (number["reduce_sum"], -1)
    assert list(made_by(jaxpr.eqns)) == list(flow.place)
    assert list(read_by(jaxpr.eqns)) == list(flow.read)


def test_what_is_needed_for_what():
    jaxpr, flow = flow_of(f, jnp.ones(3), jnp.ones(3))
    (product, low), (sine,) = jaxpr.outvars, [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sin"]
    assert names(flow.needed([product])) == ["sin", "cos", "exp", "mul"]
    assert names(flow.needed([product], {low})) == ["exp", "mul"]
    assert names(flow.needed([low], set(sine.outvars))) == ["cos"]
    assert names(flow.needed([low], always=[len(jaxpr.eqns) - 1])) == ["sin", "cos", "reduce_sum"]


def test_equations_with_effects_are_told():
    def printing(x):
        jax.debug.print("{}", jnp.sin(x))
        return jnp.cos(x)

    jaxpr, flow = flow_of(printing, 1.0)
    assert [jaxpr.eqns[i].effects for i in flow.acting] == [eqn.effects for eqn in jaxpr.eqns if eqn.effects] != []
    assert "sin" in names(flow.needed([], always=flow.acting))
    assert "cos" not in names(flow.needed([], always=flow.acting))


def test_what_follows_from_what():
    jaxpr, flow = flow_of(lambda x, y: jnp.sin(x) + jnp.exp(y) * jnp.zeros(3), jnp.ones(3), jnp.ones(3))
    x, y = jaxpr.invars
    of_x = flow.following([x], lambda eqn: True)
    assert names(eqn for eqn in jaxpr.eqns if of_x.issuperset(eqn.outvars)) == ["sin", "broadcast_in_dim"]
    assert flow.following([x, y], lambda eqn: True).issuperset(jaxpr.outvars)
    assert flow.following([x, y], lambda eqn: eqn.primitive.name != "exp").isdisjoint(jaxpr.outvars)


def test_other_names_lead_to_the_variable_whose_bytes_they_have():
    def g(x):
        wide = jnp.sin(x).reshape(3, 1).reshape(1, 3)
        return wide * 2

    jaxpr, flow = flow_of(g, jnp.ones(3))
    sine, *views, last = jaxpr.eqns
    assert names(views) == ["reshape"] * 2
    assert flow.names == {view.outvars[0]: sine.outvars[0] for view in views}
    assert flow.roots[-1] == set(sine.outvars)
    assert aliases([views[1]], aliases([views[0]])) == flow.names
    assert renamed(last.invars, flow.names)[0] is sine.outvars[0]
