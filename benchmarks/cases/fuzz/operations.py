"""Parts without inner functions: elementwise operations, products, norms, reductions, convolutions, randomness."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.linalg

from benchmarks.cases.fuzz.parts import Apply, Maker

_ELEMENTWISE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "sin": jnp.sin,
    "bell": lambda h: jnp.exp(-(h**2)),
    "root": lambda h: jnp.sqrt(1 + h**2) - 1,
    "log": lambda h: jnp.log1p(jnp.abs(h)),
    "erf": jax.scipy.special.erf,
    "clip": lambda h: jnp.clip(h, -1.5, 1.5),
    "ratio": lambda h: h / (1 + h**2),
    "angle": lambda h: jnp.arctan2(h, 1 + h**2),
    "log_add": lambda h: jnp.logaddexp(h, -h),
    "cubed": lambda h: jnp.tanh(h) ** 3,
    "power": lambda h: (1 + h**2) ** 0.3,
    "where": lambda h: jnp.where(h > 0.2, jnp.sin(h), 0.5 * h),
    "largest": lambda h: jnp.maximum(h, jnp.tanh(2 * h)),
}


def elementwise(m: Maker) -> Apply:
    chosen = [_ELEMENTWISE[m.one_of(*_ELEMENTWISE)] for _ in range(m.rng.integers(1, 4))]
    w = m.weight(m.shape.width, scale=0.5)

    def apply(p, h, data):
        h = h * (1 + p[w])
        for f in chosen:
            h = f(h)
        return h

    return apply


def products(m: Maker) -> Apply:
    """A layer that widens, with or without a gate."""
    wide, gate = m.shape.width * m.one_of(1, 2, 4), m.chance(0.5)
    up, down, other = m.weight(m.shape.width, wide), m.weight(wide, m.shape.width), m.weight(m.shape.width, wide)
    f = _ELEMENTWISE[m.one_of("tanh", "gelu", "silu", "relu", "sin")]

    def apply(p, h, data):
        inner = f(h @ p[up]) * (jax.nn.sigmoid(h @ p[other]) if gate else 1.0)
        return inner @ p[down]

    return apply


def bilinear(m: Maker) -> Apply:
    rank = 4
    a, b = m.weight(m.shape.width, rank), m.weight(rank, rank, m.shape.width)

    def apply(p, h, data):
        low = jnp.tanh(h @ p[a])
        return jnp.einsum("ri,rj,ijw->rw", low, low[:, ::-1], p[b])

    return apply


def norm(m: Maker) -> Apply:
    kind, scale = m.one_of("layer", "rms", "batch"), m.weight(m.shape.width, scale=0.3)

    def apply(p, h, data):
        axis = 0 if kind == "batch" else -1
        if kind != "rms":
            h = h - h.mean(axis, keepdims=True)
        return h * jax.lax.rsqrt((h**2).mean(axis, keepdims=True) + 1e-3) * (1 + p[scale])

    return apply


def softmax(m: Maker) -> Apply:
    kind, axis = m.one_of("softmax", "log_softmax", "logsumexp"), m.one_of(0, 1)

    def apply(p, h, data):
        if kind == "logsumexp":
            return h - jax.nn.logsumexp(h, axis, keepdims=True)
        return jax.nn.softmax(3 * h, axis) * h.shape[axis] if kind == "softmax" else jax.nn.log_softmax(h, axis)

    return apply


def attention(m: Maker) -> Apply:
    shape, heads, causal = m.shape, m.one_of(1, 2), m.chance(0.5)
    qkv, out = m.weight(shape.width, 3 * shape.width), m.weight(shape.width, shape.width)

    def apply(p, h, data):
        q, k, v = jnp.split((h @ p[qkv]).reshape(shape.batch, shape.length, heads, -1), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        if causal:
            scores = jnp.where(jnp.tri(shape.length, dtype=bool), scores, -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(shape.rows, -1) @ p[out]

    return apply


def mixing(m: Maker) -> Apply:
    """Over positions, by transposes."""
    shape, w = m.shape, m.weight(m.shape.length, m.shape.length)

    def apply(p, h, data):
        turned = h.reshape(shape.batch, shape.length, -1).transpose(0, 2, 1)
        return jnp.swapaxes(jnp.sin(turned @ p[w]), 1, 2).reshape(h.shape)

    return apply


def convolution(m: Maker) -> Apply:
    shape, flat = m.shape, m.chance(0.5)
    groups, dilation = m.one_of(1, 2), m.one_of(1, 2)
    window = (3,) if flat else (3, 3)
    size = (shape.batch, shape.length, shape.width) if flat else (shape.batch, shape.length // 4, 4, shape.width)
    kernel = m.weight(*window, shape.width // groups, shape.width)
    names = ("NTC", "TIO", "NTC") if flat else ("NHWC", "HWIO", "NHWC")

    def apply(p, h, data):
        out = jax.lax.conv_general_dilated(
            h.reshape(size),
            p[kernel],
            (1,) * len(window),
            "SAME",
            rhs_dilation=(dilation,) * len(window),
            dimension_numbers=names,
            feature_group_count=groups,
        )
        return jax.nn.relu(out).reshape(h.shape)

    return apply


def strided(m: Maker) -> Apply:
    """Down by a convolution with a stride, and up again."""
    shape = m.shape
    down, up = m.weight(2, shape.width, 2 * shape.width), m.weight(2 * shape.width, shape.width)

    def apply(p, h, data):
        h = h.reshape(shape.batch, shape.length, shape.width)
        half = jax.lax.conv_general_dilated(h, p[down], (2,), "VALID", dimension_numbers=("NTC", "TIO", "NTC"))
        return jnp.repeat(jnp.tanh(half) @ p[up], 2, axis=1).reshape(shape.rows, shape.width)

    return apply


def pool(m: Maker) -> Apply:
    shape, kind = m.shape, m.one_of("max", "mean")

    def apply(p, h, data):
        h = h.reshape(shape.batch, shape.length, shape.width)
        init, f = (-jnp.inf, jax.lax.max) if kind == "max" else (0.0, jax.lax.add)
        return jax.lax.reduce_window(h, init, f, (1, 3, 1), (1, 1, 1), "SAME").reshape(shape.rows, shape.width)

    return apply


def reduction(m: Maker) -> Apply:
    kind, axis = m.one_of("max", "min", "prod", "std", "sum", "argmax", "norm"), m.one_of(0, 1)

    def apply(p, h, data):
        if kind == "argmax":
            return h + jax.nn.one_hot(h.argmax(1), h.shape[1], dtype=h.dtype)
        if kind == "norm":
            return h / (1 + jnp.linalg.norm(h, axis=axis, keepdims=True))
        if kind == "prod":
            return h * jnp.prod(1 + 0.1 * jnp.tanh(h[::8] if axis == 0 else h), axis=axis, keepdims=True)
        return h - jnp.tanh(getattr(h, kind)(axis, keepdims=True) * (1 / h.shape[axis] if kind == "sum" else 1))

    return apply


def cumulative(m: Maker) -> Apply:
    shape, kind = m.shape, m.one_of("sum", "max", "logsumexp", "prod", "associative")
    reverse = m.chance(0.3)

    def apply(p, h, data):
        h = h.reshape(shape.batch, shape.length, shape.width)
        if kind == "associative":
            decay = jax.nn.sigmoid(h)
            combine = lambda one, other: (one[0] * other[0], one[1] * other[0] + other[1])
            out = jax.lax.associative_scan(combine, (decay, h), axis=1, reverse=reverse)[1]
        elif kind == "prod":
            out = jax.lax.cumprod(1 + 0.1 * jnp.tanh(h), axis=1, reverse=reverse)
        else:
            f = {"sum": jax.lax.cumsum, "max": jax.lax.cummax, "logsumexp": jax.lax.cumlogsumexp}[kind]
            out = f(h, axis=1, reverse=reverse) / (4.0 if kind == "sum" else 1.0)
        return out.reshape(shape.rows, shape.width)

    return apply


def solved(m: Maker) -> Apply:
    w, kind = m.weight(m.shape.width, m.shape.width, scale=0.05), m.one_of("solve", "cholesky", "triangular")

    def apply(p, h, data):
        matrix = jnp.eye(h.shape[1]) + p[w]
        if kind == "solve":
            return jnp.linalg.solve(matrix, h.T).T
        if kind == "triangular":
            return jax.scipy.linalg.solve_triangular(matrix, h.T, lower=True).T
        return h @ jnp.linalg.cholesky(matrix @ matrix.T + jnp.eye(h.shape[1]))

    return apply


def frequencies(m: Maker) -> Apply:
    """A filter of frequencies: complex numbers."""
    shape, w = m.shape, m.weight(m.shape.length // 2 + 1, m.shape.width, scale=0.5)

    def apply(p, h, data):
        found = jnp.fft.rfft(h.reshape(shape.batch, shape.length, -1), axis=1)
        return jnp.fft.irfft(found * jnp.exp(1j * p[w]), n=shape.length, axis=1).reshape(h.shape)

    return apply


def dropout(m: Maker) -> Apply:
    number, kind = int(m.rng.integers(1000)), m.one_of("bernoulli", "normal", "shared")

    def apply(p, h, data):
        key = data["key"] if kind == "shared" else jax.random.fold_in(data["key"], number)
        if kind == "normal":
            return h * (1 + 0.1 * jax.random.normal(key, h.shape, h.dtype))
        return jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)

    return apply


def masked(m: Maker) -> Apply:
    return lambda p, h, data: jnp.where(data["mask"], jnp.tanh(h), jax.lax.stop_gradient(h) * 0.5)


def narrow(m: Maker) -> Apply:
    """In float32."""
    w, f = m.weight(m.shape.width, m.shape.width), _ELEMENTWISE[m.one_of("tanh", "gelu", "sin")]
    m.params[w] = m.params[w].astype("float32")

    def apply(p, h, data):
        return f(h.astype(jnp.float32) @ p[w]).astype(h.dtype)

    return apply


_WITHIN_ROWS = (elementwise, products, bilinear, norm, softmax, attention, mixing)
_ACROSS = (convolution, strided, pool, reduction, cumulative, solved, frequencies)
OPERATIONS = (*_WITHIN_ROWS, *_ACROSS, dropout, masked, narrow)
