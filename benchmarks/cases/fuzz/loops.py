"""Parts that are loops round other parts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases.fuzz.parts import Apply, Maker, Part

Inner = Callable[[], Part]


def _stacked(m: Maker, part: Part, count: int) -> slice:
    """Parameters for as many parts that are alike; integers are the same in all."""
    start = len(m.params)
    for leaf in part.params:
        leaves = np.stack([np.asarray(leaf)] * count)
        if leaves.dtype.kind == "f":
            leaves = leaves * (1 + 0.3 * m.rng.normal(size=leaves.shape)).astype(leaves.dtype)
        m.params.append(leaves)
    return slice(start, len(m.params))


def layers(m: Maker, inner: Inner) -> Apply:
    """A scan over layers, with results of each turn, an integer in the carry, in either direction."""
    part, count = inner(), int(m.rng.integers(2, 7))
    own, reverse, unroll = _stacked(m, part, count), m.chance(0.3), m.one_of(1, 1, 2)
    ys, skip = m.one_of("", "sums", "streams", "means"), m.chance(0.7)

    def apply(p, h, data):
        def turn(carry, slices):
            h, number = carry
            params, i = slices
            new = part.apply(params, h, data | {"key": jax.random.fold_in(data["key"], i)})
            new = 0.7 * h + 0.5 * new if skip else new
            out = {"": None, "sums": jnp.sum(jnp.tanh(new)), "streams": jnp.sin(new), "means": new.mean(0)}[ys]
            return (new, number + i), out

        begin: Any = h, 0
        (h, number), outs = jax.lax.scan(turn, begin, (p[own], jnp.arange(count)), reverse=reverse, unroll=unroll)
        h = h * (1 + 0.01 * number.astype(h.dtype))
        if ys == "streams":
            return h + 0.3 * outs[::-1].mean(0)
        return h if outs is None else h + 1e-3 * jnp.sum(jnp.sin(outs))

    return apply


def repeated(m: Maker, inner: Inner) -> Apply:
    """A `fori_loop` whose count is known, with the same parameters in all turns."""
    part, count = inner(), int(m.rng.integers(2, 6))
    start = len(m.params)
    m.params += part.params

    def apply(p, h, data):
        own = p[start:]

        def turn(i, h):
            return 0.8 * h + 0.3 * jnp.tanh(part.apply(own, h, data)) * jnp.where(i % 2 == 0, 1.0, 0.5)

        return jax.lax.fori_loop(0, count, turn, h)

    return apply


def recurrent(m: Maker) -> Apply:
    """A recurrence over time, gated or not, that may have a recurrence in each of its turns."""
    shape, nested, reverse = m.shape, m.chance(0.25), m.chance(0.3)
    w, u = m.weight(shape.width, 2 * shape.width), m.weight(shape.width, 2 * shape.width)
    returns, keeps = m.one_of("all", "last", "both"), m.chance(0.3)

    def apply(p, h, data):
        steps = h.reshape(shape.batch, shape.length, -1).swapaxes(0, 1)
        ids = data["ids"].reshape(shape.batch, shape.length).T

        def turn(carry, slices):
            x, one = slices
            into = x @ p[w]

            def once(carry, factor):
                new, gate = jnp.split(into + factor * carry @ p[u], 2, 1)
                gate = jax.nn.sigmoid(gate)
                return gate * carry + (1 - gate) * jnp.tanh(new)

            if nested:
                new, _ = jax.lax.scan(lambda c, f: (once(c, f), None), carry, jnp.linspace(0.5, 1, 3))
            else:
                new = once(carry, 1.0)
            if keeps:
                new = jnp.where((one % 5 == 0)[:, None], carry, new)
            return new, new

        last, outs = jax.lax.scan(turn, jnp.zeros_like(steps[0]), (steps, ids), reverse=reverse)
        if returns == "last":
            return h * 0.5 + jnp.repeat(last, shape.length, 0)
        if returns == "both":
            outs = outs * jnp.sin(last)
        return outs.swapaxes(0, 1).reshape(h.shape)

    return apply


def simulated(m: Maker) -> Apply:
    """Steps of an equation, with a force at each step; the whole stream is the state."""
    w, count, observed = m.weight(m.shape.width, m.shape.width), m.one_of(8, 16, 24), m.chance(0.5)

    def apply(p, h, data):
        def turn(state, time):
            h, speed = state
            speed = 0.9 * speed + 0.1 * (jnp.sin(h @ p[w] + time) - h)
            h = h + 0.1 * speed
            return (h, speed), (jnp.mean(h**2) if observed else None)

        (h, speed), seen = jax.lax.scan(turn, (h, jnp.zeros_like(h)), jnp.linspace(0, 1, count))
        return h + speed if seen is None else (h + speed) * (1 + 0.1 * jnp.sum(jnp.tanh(seen)))

    return apply


def counted(m: Maker) -> Apply:
    """A `while_loop` that nothing is differentiated through; what it finds scales the stream."""
    w, most = m.weight(m.shape.width, m.shape.width), int(m.rng.integers(2, 6))

    def apply(p, h, data):
        start = jax.lax.stop_gradient(h)

        def turn(state):
            i, found = state
            return i + 1, jnp.tanh(found @ jax.lax.stop_gradient(p[w]))

        begin: Any = 0, start
        i, found = jax.lax.while_loop(lambda s: (s[0] < most) & (jnp.sum(s[1] ** 2) > 1e-6), turn, begin)
        return jnp.sin(h @ p[w]) * (1 + 0.1 * found) / (1 + i.astype(h.dtype))

    return apply


def searched(m: Maker) -> Apply:
    """A root by bisection, differentiated by the theorem of implicit functions."""
    w = m.weight(m.shape.width, scale=0.3)

    @jax.custom_jvp
    def root(h):
        """Solves y + tanh(y) = h for y."""

        def turn(_, ends):
            low, high = ends
            middle = (low + high) / 2
            above = middle + jnp.tanh(middle) > h
            return jnp.where(above, low, middle), jnp.where(above, middle, high)

        return jax.lax.fori_loop(0, 40, turn, (h - 1.0, h + 1.0))[0]

    @root.defjvp
    def _(primals, tangents):
        y = root(*primals)
        return y, tangents[0] / (2 - jnp.tanh(y) ** 2)

    return lambda p, h, data: root(h * (1 + p[w]))


LOOPS_ALONE = (recurrent, simulated, counted, searched)
LOOPS_ROUND = (layers, repeated)
