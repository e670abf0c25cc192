"""Cotangents that a product reads transposed, on a CPU: they are written once, and not computed within the copies."""

import dataclasses
import re

import jax
import jax.numpy as jnp

import memjax
from memjax._core.program.dataflow import Dataflow
from memjax._plan.solve.transposed import read_transposed

ROWS, WIDTH = 64, 32


def loss(ws, x):
    """Each layer's cotangent is made by what is elementwise, and read for the gradients of the weight and of x."""
    for w in ws:
        x = x + jnp.tanh(jnp.tanh(x @ w) * x)
    return jnp.sum(x**2)


def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    return [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[1:]], jax.random.normal(keys[0], (4, ROWS, WIDTH))


def sums_within_copies(f):
    """Kernels of the compiled gradient that compute something for a copy whose last dimension was another one."""
    options = memjax.remat_compiler_options("cpu")
    text = jax.jit(jax.grad(f), compiler_options=options).lower(*arguments()).compile().as_text()
    kernels = re.findall(r"^%\S+ \(.*?^}", text, re.MULTILINE | re.DOTALL)
    return [one for one in kernels if " copy(" in one and " multiply(" in one and f"f32[{WIDTH},{4 * ROWS}]" in one]


def test_cotangents_are_written_before_they_are_copied():
    plan = dataclasses.replace(memjax.plan(loss, *arguments(), budget="300KiB"), in_steps=False)
    assert len(sums_within_copies(loss)) == 4
    # That of the first layer, of which x needs no gradient, is read for the copy alone.
    assert len(sums_within_copies(memjax.planned(loss, plan=plan))) == 1


def products(f, *shapes):
    jaxpr = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).jaxpr
    return len(read_transposed(Dataflow(jaxpr.eqns)))


def test_what_several_read_and_a_product_transposed_is_found():
    over = lambda *dims: lambda x, y: jax.lax.dot_general(x, y, ((dims, dims), ((), ())))
    both = lambda product: lambda x, y: (product(jnp.sin(x), y), jnp.cos(jnp.sin(x)))
    twice = lambda product: lambda x, y: [(s := jnp.sin(x)), product(s, y), jnp.cos(s)]
    shapes = (4, 8, 16), (4, 8, 16)
    assert products(twice(over(0, 1)), *shapes) == 1
    assert products(twice(over(1)), *shapes) == 1  # the first dimension is moved before the last
    assert not products(twice(over(2)), *shapes)
    assert not products(twice(over(0)), (8, 16), (8, 16))
    assert not products(both(over(0, 1)), *shapes)  # nothing else reads it: written, it would take more memory
    assert not products(lambda x, y: (over(0, 1)(x, y), jnp.cos(x)), *shapes)  # an input is in memory
