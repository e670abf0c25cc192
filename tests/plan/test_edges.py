"""Message passing in tiles of edges: gradients are those of all edges at once, and no array is as long as these and wide."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ops import segment_max, segment_sum

import memjax
from memjax._core.program.costs import flops
from memjax._core.program.jaxpr import trace
from memjax._plan.batch.passes import with_edges_of
from memjax._plan.derivative import Derivative
from tests.jit.test_microbatches import descend

NODES, EDGES, WIDTH, ROUNDS = 20, 96, 4, 2


def normed(x, scale):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * scale


def messages(params, graph, drop=0.0):
    """Rounds that update edges and nodes, with norms and skip connections."""
    x, e = graph["nodes"] @ params["nodes"], graph["edges"] @ params["edges"]
    for number, (w, v, u, scale) in enumerate(params["rounds"]):
        h = jax.nn.gelu(jnp.concatenate([e, x[graph["senders"]], x[graph["receivers"]]], -1) @ w)
        if drop:
            h = jnp.where(jax.random.bernoulli(jax.random.key(number), 1 - drop, h.shape), h, 0)
        h = jnp.tanh(h @ v)
        e = normed(e + h, scale)
        x = normed(x + jnp.tanh(jnp.concatenate([x, segment_sum(h, graph["receivers"], len(x))], -1) @ u), scale)
    return x, e


def of_nodes(params, graph):
    return jnp.sum(messages(params, graph)[0] ** 3)


def of_edges(params, graph):
    """A loss of each edge."""
    return jnp.mean(messages(params, graph)[1] ** 3)


def dropped_out(params, graph):
    return jnp.sum(messages(params, graph, drop=0.3)[0] ** 3)


def both_ways(params, graph):
    """Each edge once in either direction: twice as many in the step as in the arguments."""
    ends = [jnp.concatenate([graph[a], graph[b]]) for a, b in (("senders", "receivers"), ("receivers", "senders"))]
    edges = jnp.concatenate([graph["edges"], -graph["edges"]])
    return of_nodes(params, {**graph, "edges": edges, "senders": ends[0], "receivers": ends[1]})


def mean_of_neighbours(params, graph):
    x, (senders, receivers) = graph["nodes"] @ params["nodes"], (graph["senders"], graph["receivers"])
    for w, v, _, _ in params["rounds"]:
        h = jnp.tanh(jnp.concatenate([x[senders], x[receivers], graph["edges"] @ params["edges"]], -1) @ w) @ v
        count = segment_sum(jnp.ones_like(h), receivers, len(x))
        x = x + segment_sum(h, receivers, len(x)) / jnp.maximum(count, 1)
    return jnp.sum(jnp.sin(x))


def attention(params, graph):
    """The softmax over neighbours needs the scores of all edges, one number for each, and nothing else."""
    x, (senders, receivers) = graph["nodes"] @ params["nodes"], (graph["senders"], graph["receivers"])
    for w, v, _, _ in params["rounds"]:
        h = jnp.tanh(jnp.concatenate([x[senders], x[receivers], graph["edges"] @ params["edges"]], -1) @ w) @ v
        score = h[:, 0] * 3
        score = jnp.exp(score - segment_max(score, receivers, len(x))[receivers])
        share = score / segment_sum(score, receivers, len(x))[receivers]
        x = jnp.tanh(x + segment_sum(share[:, None] * h, receivers, len(x)))
    return jnp.sum(jnp.sin(x))


def problem(nodes=NODES, edges=EDGES, width=WIDTH, dtype=None, count=ROUNDS):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jax.device_put(np.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), dtype))
    rounds = [
        (draw(3 * width, 2 * width), draw(2 * width, width), draw(2 * width, width), jnp.ones(width, dtype))
        for _ in range(count)
    ]
    ends = {name: jax.device_put(rng.integers(nodes, size=edges)) for name in ("senders", "receivers")}
    graph = {"nodes": draw(nodes, 5) * 3, "edges": draw(edges, 3) * 3, **ends}
    return {"nodes": draw(5, width), "edges": draw(3, width), "rounds": rounds}, graph


def passes(loss, params, graph, tile):
    """The passes in tiles of edges, and their gradients."""
    leaves, tree = jax.tree.flatten(params)
    closed = trace(lambda *leaves: [loss(jax.tree.unflatten(tree, leaves), graph)], list(map(jax.typeof, leaves)), {})
    inputs = [*closed.consts, *leaves]
    wrt = [False] * len(closed.consts) + [True] * len(leaves)
    derivative = Derivative(closed, list(map(jax.typeof, inputs)), wrt, [True], {})
    found = with_edges_of(derivative, "cpu", tile)
    assert found is not None
    products = lambda of: sum(map(flops, (*of.forward.eqns, *of.backward.eqns)))
    assert products(found) <= 4 / 3 * products(derivative)  # the messages are computed once more, and once only

    @jax.jit
    def run(inputs):
        [value], pull = found.vjp(inputs)
        return value, pull([jnp.ones_like(value)])

    return found, *run(inputs)


LOSSES = [of_nodes, of_edges, dropped_out, both_ways, mean_of_neighbours, attention]


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_all_edges(loss):
    with jax.enable_x64(True):
        params, graph = problem()
        length = 2 * EDGES if loss is both_ways else EDGES
        found, value, gradients = passes(loss, params, graph, tile=40)
        expected, wanted = jax.jit(jax.value_and_grad(loss))(params, graph)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        for a, b in zip(gradients, jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * float(jnp.max(jnp.abs(b))))
        assert found.tiled.length == length
        assert found.tiled.tile == 40
        for eqn in (*found.forward.eqns, *found.backward.eqns):
            for out in eqn.outvars:  # what rounds hand on is as wide as they say
                assert out.aval.shape[:1] != (length,) or out.aval.size <= length * WIDTH


def is_close(found, wanted):
    """In float32, in which sums have another order."""
    assert jnp.linalg.norm(found - wanted) <= 1e-5 * jnp.linalg.norm(wanted)


def test_edges_as_many_as_nodes_stay_exact():
    with jax.enable_x64(True):
        params, graph = problem(nodes=EDGES)
        _, value, gradients = passes(of_nodes, params, graph, tile=16)
        expected, wanted = jax.jit(jax.value_and_grad(of_nodes))(params, graph)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), gradients, jax.tree.leaves(wanted)
        )


def test_sums_of_narrow_floats_are_rounded_once():
    """Tiles add up in float32: no less exact than all edges at once in bfloat16."""
    params, graph = problem(edges=960, dtype=jnp.bfloat16)
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, t) for t in (params, graph)]
    _, _, gradients = passes(mean_of_neighbours, params, graph, tile=60)
    gradient = jax.jit(jax.grad(mean_of_neighbours))
    exact, plain = gradient(*wide), gradient(params, graph)
    error = lambda found: sum(
        float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        if b.any()
    )
    assert error(gradients) <= 1.1 * error(plain)


def test_plans_find_edges():
    """At a fifth of the bytes: the gradients, and the bytes that the plan promises."""
    params, graph = problem(nodes=100, edges=1600, width=16, count=1)
    plain = jax.jit(jax.value_and_grad(of_nodes)).lower(params, graph).compile()
    budget = plain.memory_analysis().temp_size_in_bytes // 5
    plan = memjax.plan(of_nodes, params, graph, budget=budget, allow=("recompute", "tile"))
    assert [(one.length, one.tile) for one in plan.tiled] == [(1600, 100)]
    planned = memjax.planned(of_nodes, plan=memjax.Plan.from_json(plan.to_json()))
    compiled = jax.jit(jax.value_and_grad(planned)).lower(params, graph).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= budget
    found, wanted = compiled(params, graph), plain(params, graph)
    jax.tree.map(is_close, found, wanted)


def test_steps_run_in_tiles_of_edges():
    params, graph = problem(nodes=100, edges=1600, width=16, count=1)
    step = descend(dropped_out)
    plain = jax.jit(step).lower(params, graph).compile()
    found = plain.memory_analysis()
    budget = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes // 5
    jitted = memjax.jit(step, budget=budget)
    plan = jitted.plan(params, graph)
    assert plan.nbytes <= budget
    assert [one.length for one in plan.tiled] == [1600]
    again = memjax.jit(step, plan=type(plan).from_json(plan.to_json()))
    jax.tree.map(is_close, again(params, graph), plain(params, graph))
