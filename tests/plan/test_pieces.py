"""Where long programs are cut."""

from itertools import pairwise

import jax
import jax.numpy as jnp

from memjax._core.program.jaxpr import calls_in_place
from memjax._plan.solve import phases


def test_of_too_many_equal_places_those_that_stay_are_spread_out(monkeypatch):
    def layers(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    closed = jax.make_jaxpr(layers)([jnp.zeros((8, 8))] * 24, jnp.zeros((4, 8)))
    program = calls_in_place(closed, differentiable=False)
    cuts = lambda: phases.cut_points(program, program.outvars, set(program.invars))
    longest = lambda cuts: max(stop - start for start, stop in pairwise(cuts))
    every = cuts()
    monkeypatch.setattr(phases, "_MOST_PIECES", 12)
    fewer = cuts()
    assert set(fewer) < set(every)
    assert len(fewer) == 14
    assert longest(fewer) <= 3 * longest(every)
