"""Parts that run other parts: branches, checkpoints, `vmap`, rules of derivatives, skips and concatenations."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.cases.fuzz.loops import LOOPS_ROUND
from benchmarks.cases.fuzz.parts import Apply, Maker, Part, joined

Inner = Callable[[], Part]

is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)


def residual(m: Maker, inner: Inner) -> Apply:
    part, kind = inner(), m.one_of("plain", "before", "after")
    m.params += part.params

    def apply(p, h, data):
        normed = lambda h: h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-2)
        if kind == "before":
            return h + 0.5 * part.apply(p, normed(h), data)
        new = h + 0.5 * part.apply(p, h, data)
        return normed(new) if kind == "after" else new

    return apply


def sequence(m: Maker, inner: Inner) -> Apply:
    parts = [inner() for _ in range(m.rng.integers(2, 5))]
    params, of = joined(parts)
    m.params += params
    start = jnp.tanh if m.chance(0.3) else lambda h: h

    def apply(p, h, data):
        h = start(h)
        for i, part in enumerate(parts):
            h = part.apply(of(p, i), h, data)
        return h

    return apply


def branch(m: Maker, inner: Inner) -> Apply:
    """One of several parts, by an index or by the values; one of them may do nothing."""
    parts = [inner() for _ in range(m.one_of(1, 2, 3))]
    params, of = joined(parts)
    m.params += params
    by_value, shared = m.chance(0.4), m.weight(m.shape.width, scale=0.3)

    def apply(p, h, data):
        w, own = p[shared], p[:shared]
        one = lambda i, h: parts[i].apply(of(own, i), h * w, data)
        branches: list[Callable[[jax.Array], jax.Array]] = [functools.partial(one, i) for i in range(len(parts))]
        branches.append(lambda h: h * 0.5)
        index = (jnp.sum(h) > 0).astype(jnp.int32) if by_value else data["step"] % len(branches)
        return jax.lax.switch(index, branches, h)

    return apply


def checkpoint(m: Maker, inner: Inner) -> Apply:
    part = inner()
    m.params += part.params
    policies = jax.checkpoint_policies
    policy = m.one_of(
        None, policies.everything_saveable, policies.dots_saveable, policies.dots_with_no_batch_dims_saveable
    )
    return lambda p, h, data: jax.checkpoint(part.apply, policy=policy)(p, h, data)


def jitted(m: Maker, inner: Inner) -> Apply:
    part = inner()
    m.params += part.params
    return lambda p, h, data: jax.jit(part.apply)(p, h, data)


def mapped(m: Maker, inner: Inner) -> Apply:
    """The part for several streams, by `vmap`, and their mean."""
    part, count = inner(), m.one_of(2, 3)
    m.params += part.params
    shifts = m.weight(count, m.shape.width, scale=0.5)

    def apply(p, h, data):
        own = p[:shifts]
        one = lambda shift, i: part.apply(own, h + shift, data | {"step": data["step"] + i})
        return jax.vmap(one)(p[shifts], jnp.arange(count)).mean(0)

    return apply


def by_rule(m: Maker, inner: Inner) -> Apply:
    """The part with a backward pass by a rule: that of JAX, clipped; the forward pass runs again or its pullback is kept."""
    part, again = inner(), m.chance(0.5)
    m.params += part.params

    def apply(p, h, data):
        if not again:
            return part.apply(p, clipped(h), data)
        floats, others = ([leaf for leaf in p if is_float(leaf) == wanted] for wanted in (True, False))

        def run(floats, h, first, others, data):
            given = {True: iter(floats), False: iter(others)}
            return part.apply([next(given[is_float(leaf)]) for leaf in p], h, data | {"first": first})

        def backward(kept, ct):
            *inputs, others, data = kept
            pull = jax.vjp(lambda floats, h, first: run(floats, h, first, others, data), *inputs)[1]
            return *pull(jnp.tanh(ct)), None, None

        ruled = jax.custom_vjp(run)
        ruled.defvjp(lambda *args: (run(*args), args), backward)
        rest = {name: leaf for name, leaf in data.items() if name != "first"}
        return ruled(floats, h, data["first"], others, rest)

    return apply


@jax.custom_vjp
def clipped(h: jax.Array) -> jax.Array:
    """The same; its cotangent is clipped, by what was kept."""
    return h


clipped.defvjp(lambda h: (h, jnp.sin(h)), lambda kept, ct: (jnp.clip(ct, -1, 1) * (1 + 0.1 * kept),))


def parallel(m: Maker, inner: Inner) -> Apply:
    """Several parts of the same stream, one after another in a concatenation, and a product of it."""
    parts = [inner() for _ in range(m.rng.integers(2, 4))]
    params, of = joined(parts)
    m.params += params
    kind, w = m.one_of("concatenated", "gated", "added"), m.weight(len(parts) * m.shape.width, m.shape.width)

    def apply(p, h, data):
        outs = [part.apply(of(p, i), h, data) for i, part in enumerate(parts)]
        if kind == "concatenated":
            return jnp.concatenate(outs, 1) @ p[w]
        if kind == "gated":
            return outs[0] * jax.nn.sigmoid(outs[1])
        return sum(outs[1:], outs[0]) / len(outs)

    return apply


def dense(m: Maker, inner: Inner) -> Apply:
    """Layers that read all before them: a concatenation that only grows."""
    width, growth, count = m.shape.width, 4, int(m.rng.integers(3, 7))
    ws = [m.weight(width + i * growth, growth) for i in range(count)]
    out = m.weight(width + count * growth, width)

    def apply(p, h, data):
        for w in ws:
            h = jnp.concatenate([h, jax.nn.relu(h @ p[w])], 1)
        return h @ p[out]

    return apply


def recalled(m: Maker, inner: Inner) -> Apply:
    """The part of the stream beside what came first in the program."""
    part, w = inner(), m.weight(m.shape.width, m.shape.width)
    own = slice(w + 1, None)
    m.params += part.params
    return lambda p, h, data: part.apply(p[own], h + jnp.sin(data["first"] @ p[w]), data)


AROUND = (residual, sequence, branch, checkpoint, jitted, mapped, by_rule, parallel, dense, recalled, *LOOPS_ROUND)
