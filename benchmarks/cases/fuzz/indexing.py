"""Parts that move elements: gathers, scatters, sorts, slices, concatenations."""

import jax
import jax.numpy as jnp

from benchmarks.cases.fuzz.parts import Apply, Maker


def embedding(m: Maker) -> Apply:
    count = m.one_of(16, 64)
    table, w = m.weight(count, m.shape.width, scale=0.5), m.weight(m.shape.width, m.shape.width)

    def apply(p, h, data):
        return jnp.tanh(h @ p[w]) * p[table][data["ids"] % count]

    return apply


def gather(m: Maker) -> Apply:
    rows, kind = m.shape.rows, m.one_of("closed over", "ids", "along")
    order = m.rng.integers(0, rows, rows)

    def apply(p, h, data):
        if kind == "along":
            return jnp.take_along_axis(h, (data["ids"][:, None] + jnp.arange(h.shape[1])) % h.shape[1], 1)
        return h[order if kind == "closed over" else data["ids"] % rows]

    return apply


def segments(m: Maker) -> Apply:
    """Messages between rows: gathered, made, and added up by where they go."""
    rows, w = m.shape.rows, m.weight(2 * m.shape.width, m.shape.width)
    edges, kind = rows * m.one_of(1, 2, 4), m.one_of("sum", "mean", "softmax")
    senders, receivers = m.rng.integers(0, rows, edges), m.rng.integers(0, rows, edges)

    def apply(p, h, data):
        sent = jnp.concatenate([h[senders], h[receivers]], 1) @ p[w]
        if kind == "softmax":
            scores = jnp.exp(jnp.tanh(sent[:, :1]))
            sent = sent * scores / (jax.ops.segment_sum(scores, receivers, rows)[receivers] + 1e-6)
        out = jax.ops.segment_sum(jnp.tanh(sent), receivers, rows)
        if kind == "mean":
            out = out / (1 + jax.ops.segment_sum(jnp.ones(edges), receivers, rows)[:, None])
        return out

    return apply


def scatter(m: Maker) -> Apply:
    rows, kind = m.shape.rows, m.one_of("add", "set", "multiply")
    places = m.rng.permutation(rows)[: rows // 2]
    if kind == "add":
        places = m.rng.integers(0, rows, rows // 2)

    def apply(p, h, data):
        into = h.at[places]
        new = jnp.tanh(h[::2][: len(places)])
        if kind == "multiply":
            return into.multiply(new, unique_indices=True)
        return into.add(new) if kind == "add" else into.set(new)

    return apply


def sorting(m: Maker) -> Apply:
    kind, axis = m.one_of("sort", "argsort", "top_k", "pairs"), m.one_of(0, 1)

    def apply(p, h, data):
        if kind == "sort":
            return jnp.sort(h, axis)
        if kind == "argsort":
            return jnp.take_along_axis(jnp.tanh(h), jnp.argsort(h, axis), axis)
        if kind == "pairs":
            return jax.lax.sort((h, jnp.sin(h)), dimension=axis, num_keys=1)[1]
        top, where = jax.lax.top_k(h, 4)
        return h + jnp.zeros_like(h).at[jnp.arange(h.shape[0])[:, None], where].add(jax.nn.softmax(top))

    return apply


def slices(m: Maker) -> Apply:
    kind = m.one_of("halves", "pad", "dynamic", "update", "roll", "flip")
    number = int(m.rng.integers(1, m.shape.rows // 2))

    def apply(p, h, data):
        half = h.shape[0] // 2
        if kind == "halves":
            left, right = jnp.split(h, 2, axis=1)
            return jnp.concatenate([left * jax.nn.sigmoid(right), right], 1)
        if kind == "pad":
            return jnp.pad(h, ((number, 0), (0, 0)))[: h.shape[0]] + h
        start = (data["ids"][number] + number) % half
        if kind == "dynamic":
            part = jax.lax.dynamic_slice_in_dim(h, start, half)
            return jnp.concatenate([jnp.sin(part), part * 0.5])
        if kind == "update":
            return jax.lax.dynamic_update_slice_in_dim(h, jnp.tanh(h[:half] * 2), start, 0)
        return jnp.roll(h, number, 0) * h if kind == "roll" else jnp.flip(h, 1) + h[::-1]

    return apply


def experts(m: Maker) -> Apply:
    """Each row by one of several matrices, which its largest score chooses."""
    count, w = 4, m.weight(4, m.shape.width, m.shape.width, scale=m.shape.width**-0.5)
    router = m.weight(m.shape.width, 4)

    def apply(p, h, data):
        scores = jax.nn.softmax(h @ p[router])
        chosen = jnp.argmax(scores, 1)
        mask = jax.nn.one_hot(chosen, count, dtype=h.dtype)
        gate = jnp.take_along_axis(scores, chosen[:, None], 1)
        return gate * jnp.einsum("rw,ewv,re->rv", h, p[w], mask)

    return apply


INDEXING = (embedding, gather, segments, scatter, sorting, slices, experts)
