"""Sums by index, as over the edges of a graph, in tiles of edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ops import segment_max, segment_sum

from memjax.remat import tiled

NODES, EDGES = 7, 45


def messages(w, nodes, edges, senders, receivers):
    h = jnp.tanh(jnp.concatenate([edges, nodes[senders], nodes[receivers]], -1) @ w)
    return segment_sum(h, receivers, NODES), segment_sum(jnp.ones_like(h), receivers, NODES), h + edges


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jax.device_put(rng.normal(size=shape))
    ends = [jax.device_put(rng.integers(NODES, size=EDGES)) for _ in range(2)]
    return draw(9, 3), draw(NODES, 3), draw(EDGES, 3), *ends


def test_sums_by_index_are_exact():
    with jax.enable_x64(True):
        args = arguments()
        run = tiled(messages, in_axes=(None, None, 0, 0, 0), out_axes=(None, None, 0), tile=8)
        loss = lambda f: lambda w, nodes, edges: sum(jnp.sum(jnp.sin(out)) for out in f(w, nodes, edges, *args[3:]))
        found, wanted = (jax.jit(jax.value_and_grad(loss(f), (0, 1, 2)))(*args[:3]) for f in (run, messages))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), found, wanted)


def on_a_sum(w, nodes, edges, senders, receivers):
    return jnp.zeros_like(nodes).at[receivers].add(edges) + 1


def onto_nodes(w, nodes, edges, senders, receivers):
    return nodes.at[receivers].add(edges)


def largest(w, nodes, edges, senders, receivers):
    return segment_max(edges, receivers, NODES)


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (on_a_sum, "add adds to a sum over positions"),
        (onto_nodes, "scatter-add adds to a sum over positions"),
        (largest, "scatter-max combines all positions of an index otherwise than by a sum"),
    ],
)
def test_what_is_no_sum_is_refused_by_name(f, reason):
    with pytest.raises(ValueError, match=reason):
        tiled(f, in_axes=(None, None, 0, 0, 0), out_axes=None, tile=8)(*arguments())
