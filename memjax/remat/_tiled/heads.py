"""Attention of one layer in groups of heads, projections included, so that one group's arrays exist at a time.

UPipe (Ghadia et al. 2026, "Untied Ulysses") takes heads in groups over several GPUs; here it is one GPU, or any attention
that works head by head, over several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from memjax._attention.causal import causal_attention
from memjax._core import check
from memjax._core.arrays import is_float, vary, varying_axes, zeros
from memjax._core.backward import Backward
from memjax._core.barriers import barrier
from memjax._core.clear_errors import call_errors
from memjax._core.closures import Hoisted
from memjax._core.derivatives import reverse_only
from memjax._core.lists import Arrays, drop, merge, pick
from memjax.remat._tiled.tiled import tiled

Attend = Callable[[Array, Array, Array], Array]

_FORWARD_MODE = (
    "memjax.remat.attention_in_groups cannot be differentiated in forward mode (jax.jvp, jax.jacfwd, jax.linearize): use "
    "reverse mode there (jax.grad, jax.vjp, jax.jacrev), or attention without it"
)


def attention_in_groups(
    x: Float[Array, "B T D"],
    query: Float[Array, "D N H"],
    key: Float[Array, "D K H"],
    value: Float[Array, "D K H"],
    out: Float[Array, "N H D"],
    *,
    groups: int | None = None,
    tile: int | None = None,
    norm: Callable[[Array], Array] | None = None,
    rotary: Callable[[Array, Array], Array] | None = None,
    positions: Array | None = None,
    attend: Attend | None = None,
    keep_attention: bool = False,
) -> Float[Array, "B T D"]:
    """`x` plus multi-head attention to it, computed for one group of heads after the other in both passes.

    x + sum over groups of attend(rotary(h query), rotary(h key), h value) out, with h = norm(x). Queries, keys, values and
    outputs exist for one group at a time, and what leads to them for one tile of positions at a time (`tiled`).

    Args:
      x: B sequences of T positions.
      query, key, value, out: kernels of N query heads and K heads of keys and values, H features each; N is a multiple of K.
        Their shapes are those of `nnx.MultiHeadAttention`.
      groups: in how many groups the heads are taken, a divisor of K. None: K.
      tile: positions per tile of projections; see `tiled`.
      norm: applied to x before the projections. What it closes over (a scale) is differentiated.
      rotary: applied to queries and keys of shape (B, t, heads, H), with the positions of the tile, of shape (t,) or (B, t).
      positions: of shape (T,) or (B, T), what `rotary` is given. None: 0 to T - 1; over a ring pass those of
        `memjax.shard.positions`.
      attend: attention of queries (B, T, N / groups, H) to keys and values (B, T, K / groups, H). None: causal, by
        cuDNN where the program is compiled for an NVIDIA GPU and cuDNN can, elsewhere for some rows of products at a time.
        For windows or segments any function will do, such as `functools.partial(jax.nn.dot_product_attention, ...)`;
        over a ring `functools.partial(memjax.shard.metp_attention, ...)`.
      keep_attention: keep what the backward pass of `attend` needs beside queries, keys and values, for all groups: with
        flash attention its outputs and log-sum-exps. That saves the second run of the attention.

    Returns:
      an array like x.

    Saved between forward and backward: x and the kernels; with `keep_attention` and flash attention B T N H values and
    B T N float32 more. Memory beside x, the cotangent of the result and the
    gradient of x, in the backward pass: one group's queries, outputs and their cotangents, 4 B T N H / groups values, keys and
    values and theirs, 4 B T K H / groups, and the work of `attend`. Time: one more forward pass, with
    `keep_attention` of the projections alone.

    Raises:
      ValueError: kernels that do not fit x or each other, or `groups` that does not divide K.
      TypeError: an argument of the wrong kind; forward-mode differentiation.

    Source: Ghadia et al. 2026, "Untied Ulysses: Memory-Efficient Context Parallelism via Headwise Chunking".
    """
    groups = _checked(x, query, key, value, out, groups)
    keep_attention = check.flag("keep_attention", keep_attention)
    for name, f in (("norm", norm), ("rotary", rotary), ("attend", attend)):
        if f is not None:
            check.function(name, f)
    if positions is None:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    if check.array("positions", positions).shape not in (x.shape[1:2], x.shape[:2]):
        raise check.fail(ValueError, "positions", f"of shape {x.shape[1:2]} or {x.shape[:2]}", positions)
    x, positions = vary((x, lax.stop_gradient(positions)), varying_axes(x, positions))
    in_groups = lambda kernel, axis: jnp.moveaxis(
        kernel.reshape(*kernel.shape[:axis], groups, -1, *kernel.shape[axis + 1 :]), axis, 0
    )
    kernels = vary([*(in_groups(kernel, 1) for kernel in (query, key, value)), in_groups(out, 0)], varying_axes(x))
    layer = _Layer(norm, rotary, attend or causal_attention, tile, keep_attention, kernels, x, positions)
    guarded = [reverse_only(leaf, _FORWARD_MODE) for leaf in (*vary(layer.constants, varying_axes(x)), *kernels, x)]
    n = len(layer.constants)
    return layer(guarded[:n], guarded[n:-1], guarded[-1], positions)


class _Layer:
    """The sum over groups, with its derivative.

    Attributes:
      constants: what the functions close over.
    """

    def __init__(
        self,
        norm: Callable[[Array], Array] | None,
        rotary: Callable[[Array, Array], Array] | None,
        attend: Attend,
        tile: int | None,
        keep_attention: bool,
        kernels: Arrays,
        x: Array,
        positions: Array,
    ):
        self._tile, self._positions_axis, self._keep_attention = tile, positions.ndim - 1, keep_attention

        def project(query, key, value, x, positions):
            h = x if norm is None else _like("norm", norm, x)
            q, k, v = (jnp.einsum("btd,dnh->btnh", h, kernel.astype(h.dtype)) for kernel in (query, key, value))
            if rotary is not None:
                q, k = (_like("rotary", rotary, a, positions) for a in (q, k))
            return q, k, v

        group = [jax.typeof(kernel).update(shape=kernel.shape[1:]) for kernel in kernels]
        self._project = Hoisted(project, *group[:3], x, positions)
        qkv = jax.eval_shape(project, *group[:3], x, positions)
        self._attend = Hoisted(lambda *qkv: _like("attend", attend, *qkv), *qkv)
        self.constants = [*self._project.constants, *self._attend.constants]
        self._n = len(self._project.constants)
        # As varying as where they are used: the sum over devices of their gradients is then taken once, outside.
        types = [*map(jax.typeof, vary(self._attend.constants, varying_axes(x))), *qkv]
        self._attention = Backward(
            lambda values: [self._attend(values[:-3], *values[-3:])], types, list(map(is_float, types)), [True]
        )
        self._run = jax.custom_vjp(lambda *arrays: self._forward(*arrays)[0])
        self._run.defvjp(self._save, self._back)

    def __call__(self, constants: Arrays, kernels: Arrays, x: Array, positions: Array) -> Array:
        return self._run(constants, kernels, x, positions)

    def _forward(self, constants: Arrays, kernels: Arrays, x: Array, positions: Array) -> tuple[Array, Arrays]:
        """The result, and what is kept of each group's attention, if anything is."""

        def add(out, y, o):
            return y + _outward(out, o, y.dtype)

        def step(y, kernels):
            q, k, v, _ = self._projected(constants[: self._n], kernels[:3], x, positions)
            o, kept = self._attended(constants[self._n :], q, k, v)
            y = tiled(add, (None, 1, 1), 1, tile=self._tile)(kernels[3], y, o)
            return y, self._with_outputs(o, kept) if self._keep_attention else []

        return lax.scan(step, x, kernels)

    def _save(self, constants: Arrays, kernels: Arrays, x: Array, positions: Array) -> tuple[Array, Any]:
        y, kept = self._forward(constants, kernels, x, positions)
        return y, (constants, kernels, x, positions, kept)

    def _back(self, saved: Any, dy: Array) -> tuple[Arrays, Arrays, Array, None]:
        constants, kernels, x, positions, kept = saved
        # Nothing is computed again before the cotangent is there.
        dy, x, *kept = barrier([dy, x, *kept])
        before, within = constants[: self._n], constants[self._n :]
        floats = [is_float(jax.typeof(value)) for value in constants]
        floats_before = floats[: self._n]

        def projected(some, kernels, x):
            return self._projected(merge(some, drop(before, floats_before), floats_before), kernels, x, positions)

        def outward(out, o):
            project = lambda out, o: _outward(out, o, dy.dtype)
            return tiled(project, (None, 1), 1, tile=self._tile)(out, o)

        def step(carry, group):
            sums, dx = carry
            kernels, kept = group
            (q, k, v, _), pull_projected = jax.vjp(projected, pick(before, floats_before), kernels[:3], x)
            o, kept = self._without_outputs(kept) if kept else self._attended(within, q, k, v)
            _, pull_outward = jax.vjp(outward, kernels[3], o)
            d_out, do = pull_outward(dy)
            *d_within, dq, dk, dv = self._attention.back([*within, q, k, v], kept, [do])
            # The last result is x, whose cotangent is the gradient of x so far: this group's is added to it in place.
            d_before, d_kernels, dx = pull_projected((dq, dk, dv, dx))
            sums = [a + b for a, b in zip(sums, [*d_before, *d_within], strict=True)]
            return (sums, dx), [*d_kernels, d_out]

        zero = [zeros(jax.typeof(value)) for value in pick(constants, floats)]
        (sums, dx), d_kernels = lax.scan(step, (zero, dy), (kernels, kept))
        return merge(sums, [None] * (len(constants) - len(sums)), floats), d_kernels, dx, None

    def _projected(self, constants: Arrays, kernels: Arrays, x: Array, positions: Array) -> tuple[Array, ...]:
        """One group's queries, keys and values, and x."""

        def project(kernels, x, positions):
            return (*self._project(constants, *kernels, x, positions), x)

        return tiled(project, (None, 1, self._positions_axis), 1, tile=self._tile)(kernels, x, positions)

    def _attended(self, constants: Arrays, q: Array, k: Array, v: Array) -> tuple[Array, Arrays]:
        """One group's outputs, and what its backward pass needs beside q, k and v."""
        (o,), kept = self._attention.keep([*constants, q, k, v])
        return o, kept

    def _with_outputs(self, o: Array, kept: Arrays) -> Arrays:
        return kept if self._attention.kept_outputs[0] is not None else [*kept, o]

    def _without_outputs(self, stored: Arrays) -> tuple[Array, Arrays]:
        place = self._attention.kept_outputs[0]
        return (stored[-1], stored[:-1]) if place is None else (stored[place], stored)


def _like(name: str, f: Callable[..., Array], a: Array, *others: Array) -> Array:
    """`f(a, *others)`, which is to be of the shape of `a`."""
    with call_errors(name, f, {f"array {i + 1}": value for i, value in enumerate((a, *others))}):
        out = f(a, *others)
    if check.array(f"the result of {name}", out).shape != a.shape:
        raise check.fail(ValueError, f"the result of {name}", f"of shape {a.shape}", out)
    return out


def _outward(out: Array, o: Array, dtype: Any) -> Array:
    return jnp.einsum("btnh,nhd->btd", o, out.astype(o.dtype)).astype(dtype)


def _checked(x: Any, query: Any, key: Any, value: Any, out: Any, groups: Any) -> int:
    """The number of groups. Raises ValueError or TypeError where arguments do not fit."""
    check.array("x", x, ndim=3, floating=True)
    for name, kernel in (("query", query), ("key", key), ("value", value), ("out", out)):
        check.array(name, kernel, ndim=3, floating=True)
    (dim, heads, features), kv_heads = query.shape, key.shape[1]
    if dim != x.shape[2]:
        raise check.fail(ValueError, "query", f"of shape ({x.shape[2]}, N, H), as x has {x.shape[2]} features", query)
    if heads % kv_heads if kv_heads else True:
        raise check.fail(ValueError, "key", f"of shape (D, K, H) with K a divisor of the {heads} query heads", key)
    for name, kernel, shape in (
        ("key", key, (dim, kv_heads, features)),
        ("value", value, (dim, kv_heads, features)),
        ("out", out, (heads, features, dim)),
    ):
        if kernel.shape != shape:
            raise check.fail(ValueError, name, f"of shape {shape}, to fit x and query", kernel)
    groups = kv_heads if groups is None else check.integer("groups", groups, least=1, what="a number of groups")
    if kv_heads % groups:
        raise check.fail(ValueError, "groups", f"a divisor of the {kv_heads} heads of keys and values", groups)
    return groups
