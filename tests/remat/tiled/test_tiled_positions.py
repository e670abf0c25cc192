"""Which functions `tiled` takes to mix positions, and refuses."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax._core.positions.walk import Positions, Shared
from memjax.remat import tiled
from tests.remat.tiled.tiled_cases import DIM, EXAMPLES, LENGTH, close, normal


def rows(x):
    return jnp.arange(x.shape[1], dtype=x.dtype)[:, None]


MIX = {
    "softmax": lambda x: jax.nn.softmax(x, 1),
    "mean": lambda x: x - jnp.mean(x, 1, keepdims=True),
    "batch norm": lambda x: (x - x.mean((0, 1))) / jnp.sqrt(x.var((0, 1))),
    "attention": lambda x: jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)) @ x,
    "convolution": lambda x: jax.lax.conv_general_dilated(
        x, jnp.ones((3, DIM, DIM)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "shift": lambda x: jnp.roll(x, 1, 1),
    "flip": lambda x: x[:, ::-1],
    "gather": lambda x: x[:, jnp.zeros(x.shape[1], jnp.int32)],
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "sort": lambda x: jnp.sort(x, 1),
    "scan": lambda x: jax.lax.scan(lambda c, row: (c + row, c), x[0, 0], x[0])[1][None],
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x, axis=1),
    "pooling": lambda x: nn.max_pool(x, (2,), (1,), "SAME"),
    "maximum": lambda x: x / jnp.max(x),
    "arange": lambda x: x + jnp.arange(x.shape[1], dtype=x.dtype)[:, None],
    "table": lambda x: x + np.ones(x.shape[1], x.dtype).cumsum()[:, None],
    "random": lambda x: x * jax.random.normal(jax.random.key(0), x.shape, x.dtype),
    "length": lambda x: x / jnp.asarray(x.shape[1], x.dtype),
    "transposition": lambda x: x.reshape(x.shape[0], DIM, -1).transpose(0, 2, 1),
    "product over the features with an arange": lambda x: jnp.einsum(
        "btd,t->btd", x, jnp.arange(x.shape[1], dtype=x.dtype)
    ),
    "loop that adds an arange": lambda x: sum(
        jax.lax.fori_loop(0, 2, lambda _, c: (c[0] * 2, c[1] + rows(x)), (x, jnp.zeros((x.shape[1], 1), x.dtype)))
    ),
    "choice of an arange": lambda x: sum(
        jax.lax.cond(
            jnp.ones(()) > 0, lambda x: (x, jnp.zeros((x.shape[1], 1), x.dtype)), lambda x: (x * 2, rows(x)), x
        )
    ),
    "outer": lambda x: jnp.max(x[:, :, None] * x[:, None], 2),
}


@pytest.mark.parametrize("name", MIX)
def test_mixing_positions_is_refused(name):
    with pytest.raises(ValueError, match=r"f must not mix positions, got .*lambda.*, in which .*check=False"):
        tiled(MIX[name], 1, 1, tile=4)(normal(9, EXAMPLES, LENGTH, DIM))


def test_the_operation_and_its_source_line_are_named():
    def sharpen(x):
        return x / jnp.max(x, 1, keepdims=True)

    def every_other(x):
        padding = ((0, 0), (0, x.shape[1] - 1), (0, 0))
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, 1), (1, 2, 1), padding)

    for f, fault in (
        (sharpen, "reduce_max is over positions"),
        (every_other, "reduce_window_sum is over neighbouring"),
    ):
        line = f.__code__.co_firstlineno + f.__code__.co_nlocals
        with pytest.raises(
            ValueError, match=rf"{f.__name__}, in which {fault}.*, at test_tiled_positions.py:{line} \("
        ):
            tiled(f, 1, 1, tile=4)(normal(9, EXAMPLES, LENGTH, DIM))


@pytest.mark.parametrize(
    "name",
    [
        *("mean", "square", "weighted by an arange", "constant", "maximum", "positions", "parameters alone"),
        "rows of two thirds of a position",
    ],
)
def test_what_is_no_sum_over_positions_is_refused(name):
    w = normal(1, DIM)
    f = {
        "mean": lambda x: jnp.mean(x),
        "square": lambda x: jnp.sum(x) ** 2,
        "weighted by an arange": lambda x: jnp.einsum("btd,t->d", x, jnp.arange(x.shape[1], dtype=x.dtype)),
        "constant": lambda x: jnp.sum(x) + 1,
        "maximum": lambda x: jnp.max(x),
        "positions": lambda x: jnp.sum(x, -1),
        "parameters alone": lambda x: jnp.sum(w),
        "rows of two thirds of a position": lambda x: jnp.sum(
            jax.nn.softmax(jnp.concatenate([x, x[..., : DIM // 2]], -1).reshape(-1, DIM)) ** 2
        ),
    }[name]
    with pytest.raises(ValueError, match="f must not mix positions"):
        tiled(f, 1, None, tile=4)(normal(9, EXAMPLES, LENGTH, DIM))


def experts(x):
    weights, chosen = jax.lax.top_k(x @ jnp.ones((DIM, 4), x.dtype), 2)
    one_hot = jax.nn.one_hot(chosen, 4, dtype=x.dtype)
    outs = jnp.einsum("btd,edf->btef", x, jnp.ones((4, DIM, DIM), x.dtype))
    return jnp.einsum("btke,btk,btef->btf", one_hot, jax.nn.softmax(weights), outs)


def experts_of_rows(x):
    rows = x.reshape(-1, DIM)
    weights, chosen = jax.lax.top_k(rows @ jnp.ones((DIM, 4), x.dtype), 2)
    kernels = jnp.ones((4, DIM, DIM), x.dtype)[chosen]
    return jnp.einsum("nd,nkdf,nk->nf", rows, kernels, weights).reshape(x.shape)


APART = {
    "layer norm": lambda x: jax.nn.standardize(x, -1),
    "softmax over features": lambda x: jax.nn.softmax(x),
    "projection in heads": lambda x: jnp.einsum("btd,dhk->bhtk", x, jnp.ones((DIM, 2, 4), x.dtype)).swapaxes(1, 2),
    "flattened rows": lambda x: jax.nn.relu(x.reshape(-1, DIM) @ jnp.ones((DIM, DIM), x.dtype)).reshape(x.shape),
    "experts": experts,
    "experts of flattened rows": experts_of_rows,
    "vmap": jax.vmap(jax.vmap(lambda row: jnp.dot(row, row) * row)),
    "sort of features": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "scan over features": lambda x: jnp.moveaxis(
        jax.lax.scan(lambda c, y: (c + y, c * y), jnp.zeros_like(x[..., 0]), jnp.moveaxis(x, 2, 0))[1], 0, 2
    ),
    "while": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), x),
    "cond": lambda x: jax.lax.cond(jnp.ones(()) > 0, jnp.sin, jnp.cos, x),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * 2),
    "fft of features": lambda x: jnp.fft.fft(x, axis=-1).real,
    "convolution over channels' images": lambda x: jax.lax.conv_general_dilated(
        x.reshape(-1, DIM, 1), jnp.ones((3, 1, 1), x.dtype), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ).reshape(x.shape),
}


@pytest.mark.parametrize("name", APART)
def test_what_keeps_positions_apart_is_accepted(x64, name):
    x = normal(9, EXAMPLES, LENGTH, DIM)
    close(*jax.jit(lambda x: (tiled(APART[name], 1, 1, tile=4)(x), APART[name](x)))(x))


def test_states_of_different_kinds_differ_whatever_they_hold():
    """Axes may be NumPy's integers, which compare with a tuple element by element."""
    assert Positions(np.int64(0), 1) != Shared((True, False))
    assert Positions(np.int64(0), 1) == Positions(0, 1)
