"""NNX modules have scopes while they are traced, and are what they were afterwards."""

import threading

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import memjax
from memjax._explain.nnx_scopes import nnx_scopes


class Inner(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.data({"first": nnx.Linear(8, 8, rngs=rngs)})

    def __call__(self, x):
        return jnp.sin(self.table["first"](x))


class Outer(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Inner(rngs) for _ in range(2)])
        self.head = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs))

    def encode(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def __call__(self, x):
        return self.head(self.encode(x))


class Broken(nnx.Module):
    def __call__(self, x):
        raise RuntimeError("as it should")


def loss(model, x):
    return jnp.sum(jnp.sin(model(x)))


def stacks(f, *args):
    return {str(eqn.source_info.name_stack) for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns}


def test_paths_lead_from_the_model_to_the_module():
    model, x = Outer(nnx.Rngs(0)), jnp.ones((4, 8))
    with nnx_scopes():
        found = stacks(lambda x: model(x), x)
    assert found == {
        "Outer/layers[0]",
        "Outer/layers[1]",
        "Outer/layers[0]/table/first",
        "Outer/layers[1]/table/first",
        "Outer/head/layers[0]",
    }


def test_modules_are_merged_anew_inside_of_a_function():
    graph, state = nnx.split(Outer(nnx.Rngs(0)))
    explanation = memjax.explain(lambda state, x: loss(nnx.merge(graph, state), x), state, jnp.ones((4, 8)))
    assert "Outer/layers[0..1]" in {row.path for row in explanation.rows}


def test_classes_are_as_they_were():
    before = [vars(owner)["__call__"] for owner in (Outer, Inner, nnx.Linear)]
    model, x = Outer(nnx.Rngs(0)), jnp.ones((4, 8))
    memjax.explain(loss, model, x)
    assert [vars(owner)["__call__"] for owner in (Outer, Inner, nnx.Linear)] == before
    with pytest.raises(RuntimeError, match="as it should"):
        memjax.explain(loss, Broken(), x)
    assert [vars(owner)["__call__"] for owner in (Outer, Inner, nnx.Linear)] == before
    assert stacks(lambda x: model(x), x) == {""}
    with nnx_scopes():
        assert "Outer/layers[0]" in stacks(lambda x: model(x), x), "an error leaves no module behind"


def test_other_threads_see_nothing():
    model, x, found = Outer(nnx.Rngs(0)), jnp.ones((4, 8)), []
    with nnx_scopes():
        thread = threading.Thread(target=lambda: found.append(stacks(lambda x: model(x), x)))
        thread.start()
        thread.join()
    assert found == [{""}]


def test_many_threads_at_once():
    model, x, found = Outer(nnx.Rngs(0)), jnp.ones((4, 8)), []

    def run():
        with nnx_scopes():
            found.append("Outer/layers[1]" in stacks(lambda x: model(x), x))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    assert stacks(lambda x: model(x), x) == {""}
