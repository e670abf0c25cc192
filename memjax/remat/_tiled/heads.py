"""Attention of one layer in groups of heads, projections included, so that one group's arrays exist at a time.

UPipe (Ghadia et al. 2026, "Untied Ulysses") takes heads in groups over several GPUs; here it is one GPU, or any attention
that works head by head, over several.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from memjax._attention.choice import causal_attention
from memjax._core import check
from memjax._core.arrays import is_float, vary, varying_axes, zeros
from memjax._core.backward import Backward
from memjax._core.backward.derivatives import forward_mode_message, reverse_only
from memjax._core.barriers import barrier
from memjax._core.clear_errors import call_errors
from memjax._core.compat import explicit_sharding
from memjax._core.lists import Arrays, drop, merge, pick, spread
from memjax._core.program.closures import Hoisted
from memjax._core.program.jaxpr import result_types, with_axes
from memjax._core.segments import Segments, segment_count, shards, whole
from memjax.remat._tiled.mixing import refuse_mixed_heads
from memjax.remat._tiled.tiled import tiled

Attend = Callable[[Array, Array, Array], Array]

_FORWARD_MODE = forward_mode_message("memjax.remat.attention_in_groups", "attention without it")


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
      groups: the number of groups that the heads are split into, a divisor of K. None: K. On a mesh that shards heads
        over p devices a group has heads of each of them, so it is a divisor of K / p; automatic axes do not show p, and
        more groups leave devices idle.
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
    B T N float32 more.
    Memory beside x and the result, in the forward pass: all queries, keys and values, B T (N + 2 K) H values, with outputs
    written over queries and the result over outputs where N H = D; and one group's, 2 B T (N + K) H / groups. In the backward
    pass, beside x and the cotangent of the result, over which the gradient of x is written: again all queries, keys and values,
    over which their cotangents are written; one group's queries, outputs and their cotangents, 4 B T N H / groups, and
    keys and values and theirs, 4 B T K H / groups; and the work of `attend`. With `keep_attention` cotangents of queries are
    written over the outputs, and queries, keys and values computed for one group at a time. Time: one more forward pass, with
    `keep_attention` of the projections alone.
    Rounding is that of attention to all heads at once: groups are put side by side before they are multiplied, not added up.

    Raises:
      ValueError: kernels that do not fit x or each other, `groups` that does not divide K, or an `attend` that mixes heads, or
        depends on their number (ALiBi's slopes), as far as its program shows that.
      TypeError: an argument of the wrong kind; forward-mode differentiation.

    Source: Ghadia et al. 2026, "Untied Ulysses: Memory-Efficient Context Parallelism via Headwise Chunking".
    """
    groups = _checked(x, query, key, value, out, groups)
    keep_attention = check.flag("keep_attention", keep_attention)
    for name, f in (("norm", norm), ("rotary", rotary), ("attend", attend)):
        if f is not None:
            check.function(name, f)
    positions = _checked_positions(x, positions)
    check.known_sizes("remat.attention_in_groups", x)
    if x.size == 0:  # nothing to attend to
        return jnp.asarray(x)
    x, positions = vary((x, lax.stop_gradient(positions)), varying_axes(x, positions))
    kernels = [*(whole(kernel, 0) for kernel in (query, key, value)), whole(out, 2)]
    kernels = vary(kernels, varying_axes(x))
    layer = _Layer(
        _Options(norm, rotary, attend or causal_attention, groups, tile, keep_attention), kernels, x, positions
    )
    guarded = [reverse_only(leaf, _FORWARD_MODE) for leaf in (*vary(layer.constants, varying_axes(x)), *kernels, x)]
    n = len(layer.constants)
    return layer.run(guarded[:n], guarded[n:-1], guarded[-1], positions)


class _Options(NamedTuple):
    """How attention is computed: arguments of `attention_in_groups`."""

    norm: Callable[[Array], Array] | None
    rotary: Callable[[Array, Array], Array] | None
    attend: Attend
    groups: int
    tile: int | None
    keep_attention: bool


class _Layer:
    """Attention in groups added to x, with its derivative.

    Outputs of groups are put side by side and multiplied at once, and so are the cotangents of queries, keys and values: sums
    over groups would be rounded once for each of them.

    Attributes:
      constants: what the functions close over.
      run: from these, the kernels, x and positions to the result.
    """

    def __init__(self, options: _Options, kernels: Arrays, x: Array, positions: Array):
        norm, rotary, attend, groups, self._tile, self._keep_attention = options
        self._groups = groups
        # Of the heads: a group has some of every device's.
        self._segments = segment_count(kernels[1].shape[1] // groups, kernels, (1, 1, 1, 0))
        self._positions_axis = positions.ndim - 1

        def project(query, key, value, x, positions):
            h = x if norm is None else _like("norm", norm, x)
            q, k, v = (jnp.einsum("btd,dnh->btnh", h, kernel.astype(h.dtype)) for kernel in (query, key, value))
            if rotary is not None:
                q, k = (_like("rotary", rotary, a, positions) for a in (q, k))
            return q, k, v

        group = result_types(lambda kernels: self._of_group(kernels, 0, 1), kernels[:3])
        self._project = Hoisted(project, (*group, x, positions))
        qkv = result_types(project, *group, x, positions)
        if groups > 1 and attend is not causal_attention:
            refuse_mixed_heads("attend", attend, qkv)
        if groups > 1 and rotary is not None and self._keep_attention:  # it is then run for a group's heads, too
            for one in qkv[:2]:
                refuse_mixed_heads("rotary", lambda a: _like("rotary", rotary, a, positions), [one], rotary)
        self._attend = Hoisted(lambda *qkv: _like("attend", attend, *qkv), qkv)
        self.constants = [*self._project.constants, *self._attend.constants]
        self._n = len(self._project.constants)
        # As varying as where they are used: the sum over devices of their gradients is then taken once, outside.
        types = [*map(jax.typeof, vary(self._attend.constants, varying_axes(x))), *qkv]
        self._attention = Backward(
            lambda values: [self._attend(values[:-3], *values[-3:])], types, list(map(is_float, types)), [True]
        )
        self._qkv, self._o = qkv, result_types(lambda values: self._attended(values[:-3], *values[-3:])[0], types)

        # Traces `project` for all heads and for those of a group, as the backward pass takes it.
        projected = functools.partial(self._projected, self._project.constants, x=x, positions=positions)
        for some, and_x in ((kernels[:3], False), (kernels[:3], True), (group, False)):
            jax.eval_shape(functools.partial(projected, and_x=and_x), some)
        self.run = jax.custom_vjp(lambda *arrays: self._forward(*arrays)[0])
        self.run.defvjp(self._save, with_axes(self._back, self._project.axes | self._attend.axes))

    def _forward(self, constants: Arrays, kernels: Arrays, x: Array, positions: Array) -> tuple[Array, Arrays]:
        """The result, and what is kept: the outputs of all groups, and of each what else its attention keeps."""

        def step(carry, group):
            outputs, *others = carry
            o, kept = self._attended(constants[self._n :], *self._of_group(carry[-3:], group, 2))
            return (self._put(outputs, o, group), *others), kept if self._keep_attention else []

        def add(out, o, x):
            return x + _outward(out, o.reshape(*o.shape[:2], *out.shape[:2]), x.dtype)

        # Each group's outputs are written over its queries, if they are alike.
        carry = self._projected(constants[: self._n], kernels[:3], x, positions)
        if not _alike(self._o, self._qkv[0]):
            carry = (self._side_by_side(self._o, x), *carry)
        (outputs, *_), kept = lax.scan(step, carry, self._each_group())
        # `tiled` writes over the first argument that is like the result: x is needed again, outputs are not.
        flat = outputs.reshape(*outputs.shape[:2], -1)
        y = tiled(add, (None, 1, 1), 1, tile=self._tile)(kernels[3], flat, x)
        return y, [outputs, *kept] if self._keep_attention else []

    def _save(self, constants: Arrays, kernels: Arrays, x: Array, positions: Array) -> tuple[Array, Any]:
        y, kept = self._forward(constants, kernels, x, positions)
        return y, (constants, kernels, x, positions, kept)

    def _back(self, saved: Any, dy: Array) -> tuple[Arrays, Arrays, Array, None]:
        constants, kernels, x, positions, kept = saved
        # Nothing is recomputed, nor a buffer made, before the cotangent is there.
        dy, x, zero, *kept = barrier([dy, x, jnp.zeros((), x.dtype), *kept])
        before, within = constants[: self._n], constants[self._n :]
        floats = [is_float(jax.typeof(value)) for value in constants]
        floats_before, floats_within = floats[: self._n], floats[self._n :]
        if self._keep_attention:
            # With the outputs of all groups there is room for the queries, keys and values of one. Its cotangents of queries
            # are written over its outputs.
            outputs, *kept = kept
            over_outputs = _alike(self._o, self._qkv[0])
            dq = outputs if over_outputs else self._side_by_side(self._qkv[0], x, zero)
            d_qkv = (dq, *(self._side_by_side(a, x, zero) for a in self._qkv[1:]))
        else:
            d_qkv = self._projected(before, kernels[:3], x, positions)  # over which their cotangents are written

        def outward(out, o):
            project = lambda out, o: _outward(out, o, dy.dtype)
            return tiled(project, (None, 1), 1, tile=self._tile)(out, o)

        def step(carry, group):
            (sums, d_qkv), (index, kept) = carry, group
            if self._keep_attention:
                q, k, v = self._projected(before, self._of_group(kernels[:3], index, 1), x, positions)
                (o,) = self._of_group([d_qkv[0] if over_outputs else outputs], index, 2)
            else:
                q, k, v = self._of_group(d_qkv, index, 2)
                o, kept = self._attended(within, q, k, v)
            _, pull_outward = jax.vjp(outward, self._of_group(kernels[3:], index, 0)[0], o)
            d_out, do = pull_outward(dy)
            *d_within, dq, dk, dv = self._attention.back([*within, q, k, v], self._with_output(kept, o), [do])
            sums = [a + b for a, b in zip(sums, d_within, strict=True)]
            return (sums, tuple(self._put(a, b, index) for a, b in zip(d_qkv, (dq, dk, dv), strict=True))), d_out

        sums = [zeros(jax.typeof(value)) for value in pick(within, floats_within)]
        (d_within, d_qkv), d_out = lax.scan(step, (sums, d_qkv), (self._each_group(), kept))

        def projected(some, kernels, x):
            """The last result is x, whose cotangent is dy: the gradient of x is written over it."""
            some = merge(some, drop(before, floats_before), floats_before)
            return self._projected(some, kernels, x, positions, and_x=True)

        _, pull_projected = jax.vjp(projected, pick(before, floats_before), kernels[:3], x)
        d_before, d_kernels, dx = pull_projected((*d_qkv, dy))
        d_kernels = [*d_kernels, self._in_order(d_out)]
        return spread([*d_before, *d_within], floats), d_kernels, dx, None

    def _projected(
        self, constants: Arrays, kernels: Arrays, x: Array, positions: Array, *, and_x: bool = False
    ) -> tuple[Array, ...]:
        """Computes queries, keys and values for the heads of the kernels; with `and_x`, returns x as well."""

        def project(kernels, x, positions):
            return (*self._project(constants, *kernels, x, positions), *([x] if and_x else []))

        project.__qualname__ = "norm or rotary"  # for the error of what mixes positions
        return tiled(project, (None, 1, self._positions_axis), 1, tile=self._tile)(kernels, x, positions)

    def _attended(self, constants: Arrays, q: Array, k: Array, v: Array) -> tuple[Array, Arrays]:
        """Computes a group's attention; returns its outputs, and the values its backward pass needs besides these, q, k and v."""
        (o,), kept = self._attention.keep([*constants, q, k, v])
        place = self._attention.kept_outputs[0]
        return o, [a for i, a in enumerate(kept) if i != place]

    def _with_output(self, kept: Arrays, o: Array) -> Arrays:
        """`kept` with the attention output `o` put back at its place, if it was a kept value (`_attended` removed it)."""
        place = self._attention.kept_outputs[0]
        return kept if place is None else [*kept[:place], o, *kept[place:]]

    def _each_group(self) -> Array:
        return jnp.arange(self._groups, dtype=jnp.int32)

    def _side_by_side(self, like: Any, x: Array, zero: Any = 0) -> Array:
        """Makes an array of zeros for all groups, where `like` is the array of one group; it varies over mesh axes as x does."""
        shape = (*like.shape[:2], like.shape[2] * self._groups, like.shape[3])
        return vary(jnp.broadcast_to(jnp.asarray(zero, like.dtype), shape), varying_axes(x))

    def _of_group(self, arrays: Arrays, group: Any, axis: int) -> Arrays:
        """Slices the heads of one group out of each array, along an axis."""

        def cut(array):
            heads = Segments(array.shape[axis], self._segments)
            size = heads.length // (self._groups * heads.count)
            return heads.cut(heads.split(array, axis), group * size, size, axis)

        return list(map(cut, arrays))

    def _put(self, side_by_side: Array, one: Array, group: Any) -> Array:
        """`side_by_side`, which holds all heads, with the heads of `group` replaced by `one`."""
        heads = Segments(side_by_side.shape[2], self._segments)
        size = one.shape[2] // heads.count
        return heads.join(heads.put(heads.split(side_by_side, 2), one, group * size, 2), 2)

    def _in_order(self, of_groups: Array) -> Array:
        """Merges results of shape (groups, heads of a group, ...) into (heads, ...), with heads in their original order."""
        groups, size, *others = of_groups.shape
        apart = of_groups.reshape(groups, self._segments, size // self._segments, *others)
        return jnp.moveaxis(apart, 0, 1).reshape(groups * size, *others)


def _alike(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.dtype == b.dtype)


def _like(name: str, f: Callable[..., Array], a: Array, *others: Array) -> Array:
    """Calls `f(a, *others)`; checks that the result has the shape of `a` and is floating: integers would stop the gradient."""
    with call_errors(name, f, {f"array {i + 1}": value for i, value in enumerate((a, *others))}):
        out = f(a, *others)
    if check.array(f"the result of {name}", out, floating=True).shape != a.shape:
        raise check.fail(ValueError, f"the result of {name}", f"of shape {a.shape}", out)
    return out


def _outward(out: Array, o: Array, dtype: Any) -> Array:
    sharding = explicit_sharding(jax.typeof(o))
    if sharding is not None:  # heads may be sharded: the sum over them is taken over devices, too
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:2], None))
    return jnp.einsum("btnh,nhd->btd", o, out.astype(o.dtype), out_sharding=sharding).astype(dtype)


def _checked_positions(x: Array, positions: Any) -> Array:
    """Checks the positions; if None, returns those of a whole sequence."""
    if positions is None:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    kind = check.array("positions", positions).dtype
    if not (jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating)):
        raise check.fail(TypeError, "positions", "integers or floats", positions)
    if positions.shape not in (x.shape[1:2], x.shape[:2]):
        raise check.fail(ValueError, "positions", f"of shape {x.shape[1:2]} or {x.shape[:2]}", positions)
    return positions


def _checked(x: Any, query: Any, key: Any, value: Any, out: Any, groups: Any) -> int:
    """Returns the number of groups. Raises ValueError or TypeError if the arguments do not fit."""
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
    held = math.lcm(
        *(shards(jax.typeof(kernel), axis) for kernel, axis in ((query, 1), (key, 1), (value, 1), (out, 0)))
    )
    if kv_heads % held:
        raise check.fail(
            ValueError, "key", f"of a number of heads that is a multiple of the {held} shards of heads", key
        )
    of_device = kv_heads // held
    groups = of_device if groups is None else check.integer("groups", groups, least=1, what="a number of groups")
    if of_device % groups:
        which = f"the {of_device} heads of keys and values" + (" in a shard" if held > 1 else "")
        raise check.fail(ValueError, "groups", f"a divisor of {which}", groups)
    return groups
