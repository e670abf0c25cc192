"""O = f(A B) C over a ring of devices, and the feed-forward layer that is built from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax._core import check
from memjax._core.arrays import accumulator, vary, varying_axes
from memjax._core.backward.derivatives import forward_mode_message, refusing_forward_mode
from memjax._core.barriers import barrier, joint_barrier
from memjax._core.compat import bodies
from memjax.shard import ring

_FORWARD_MODE = forward_mode_message("memjax.shard.metp and metp_mlp")
_LEAST_MESSAGE = 3 * 2**25  # bytes


def metp(
    f: Callable[[jax.Array], jax.Array],
    a: Float[Array, "... t d"],
    b: Float[Array, "d f"],
    c: Float[Array, "f e"],
    *,
    axis_name: str,
) -> Float[Array, "... t e"]:
    """`f(a b) c` of matrices spread over the p devices of a ring, with f elementwise.

    Rows of A and O stay where they are. Blocks of B's columns and C's rows travel round the ring, each hop behind the
    matmuls of a step; the backward pass circulates them again, their gradients travelling along. For t = S / p rows
    per device no array is larger than t x F/p: of f(A B) each device holds 1/p^2.

    Args:
      f: elementwise, differentiable, without array arguments of its own; called with float32 (float64 for float64).
      a: (..., t, D), this device's rows.
      b: (D, F/p), this device's columns, of a's dtype.
      c: (F/p, E), this device's rows, of a's dtype.
      axis_name: the axis of `jax.shard_map` that is the ring.

    Returns:
      (..., t, E), this device's rows, of a's dtype. Sums over the ring are kept in float32.

    Saved for the backward pass: a, b, c. Temporaries (on GPUs with `hide_hops`), in bytes for t rows over all leading
    dimensions, items of k bytes and blocks of M = (D + E) F/p entries: forward 4 t E + 2 k (t F/p + M), backward
    4 t D + (3 k t F/p + (3 k + 12) M) / n. There the block goes round in n pieces, so many that the second term does not exceed
    the first or messages become smaller than 96 MiB. Traffic per device: k (p-1) M forward, (k + 4) (p-1) M backward and
    k M / n if n > 1.

    Raises:
      ValueError: shapes that do not match, an f that is not elementwise, b or c that are the same on all devices (where
        `shard_map` tracks it: not with `check_vma=False`), or a call outside a `jax.shard_map` over `axis_name`.
      TypeError: dtypes that differ or are not floating-point.

    Source: Liang et al., "Memory-efficient tensor parallelism for long-sequence Transformer training" (2025), abstract.
    """
    return _checked_product(f, ("f", f), "a", a, {"b": b}, c, "c", axis_name)


def metp_mlp(
    x: Float[Array, "... t d"],
    w_in: Float[Array, "d f"],
    w_out: Float[Array, "f e"],
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
    w_gate: Float[Array, "d f"] | None = None,
    recompute: bool = True,
    axis_name: str,
) -> Float[Array, "... t e"]:
    """A feed-forward layer over a ring: `activation(x w_in) w_out`, or gated `(activation(x w_gate) * (x w_in)) w_out`.

    SwiGLU is `activation=jax.nn.silu` with a `w_gate`. Everything else is as in `metp`, with the gate's columns
    travelling in the same message.

    Args:
      x: (..., t, D), this device's tokens.
      w_in, w_gate: (D, F/p), this device's columns.
      w_out: (F/p, E), this device's rows.
      activation: elementwise.
      recompute: multiply x by `w_in` and `w_gate` again in the backward pass. False, for where memory is to spare: the products
        are kept, t F entries for each of the two weights, and blocks go round whole in the backward pass too (n = 1).
      axis_name: the axis of `jax.shard_map` that is the ring.

    Returns:
      (..., t, E), this device's tokens.

    Saved for the backward pass: x and the weights' local blocks, and unless `recompute` the products.

    Raises:
      ValueError, TypeError: as `metp`.
    """
    columns = {"w_in": w_in} if w_gate is None else {"w_in": w_in, "w_gate": w_gate}
    f = activation if w_gate is None else lambda up, gate: activation(gate) * up
    return _checked_product(f, ("activation", activation), "x", x, columns, w_out, "w_out", axis_name, recompute)


def _checked_product(
    f: Callable[..., jax.Array],
    f_argument: tuple[str, Any],
    a_name: str,
    a: Any,
    columns: dict[str, Any],
    c: Any,
    c_name: str,
    axis_name: str,
    recompute: bool = True,
) -> jax.Array:
    check.axis_size("axis_name", axis_name)
    check.flag("recompute", recompute)
    check_elementwise(*f_argument)
    check.array(a_name, a, floating=True)
    check.local(a_name, a)
    first, *_ = columns.values()
    for name, w in (*columns.items(), (c_name, c)):
        check.array(name, w, ndim=2, floating=True)
        if w.dtype != a.dtype:
            raise check.fail(
                TypeError, name, f"of {a_name}'s dtype {a.dtype}", w, f"pass {name}.astype({a_name}.dtype)"
            )
        check.sharded(name, w, axis_name)
    if a.ndim < 2 or 0 in a.shape:
        raise check.fail(ValueError, a_name, "of shape (..., t, D) with at least one row and column", a)
    for name, w in columns.items():
        if w.shape != (a.shape[-1], first.shape[1]) or not w.shape[1]:
            raise check.fail(
                ValueError,
                name,
                f"of shape {(a.shape[-1], first.shape[1] or 1)}, the columns that this device holds for {a_name} of shape"
                f" {a.shape}",
                w,
            )
    if c.shape[0] != first.shape[1] or not c.shape[1]:
        wanted = f"of {first.shape[1]} rows, as many as this device holds columns of {next(iter(columns))}"
        raise check.fail(ValueError, c_name, wanted, c)
    rows = a.reshape(-1, a.shape[-1])
    operands = (rows, tuple(columns.values()), c)
    operands = vary(operands, varying_axes(*jax.tree.leaves(operands)))
    product = lambda *operands: _product(f, *operands, axis_name, recompute)
    o = refusing_forward_mode(product, _FORWARD_MODE)(*operands)
    return o.reshape(*a.shape[:-1], c.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 4, 5))
def _product(
    f: Any, a: jax.Array, bs: tuple[jax.Array, ...], c: jax.Array, axis_name: str, recompute: bool
) -> jax.Array:
    return _forward(f, a, bs, c, axis_name, True)[0]


def _forward(
    f: Any, a: jax.Array, bs: tuple[jax.Array, ...], c: jax.Array, axis_name: str, recompute: bool
) -> tuple[jax.Array, Any]:
    h = _elementwise(f, len(bs), a.dtype)

    def body(carry: Any, block: Any, step: Any) -> Any:
        (o, products), (b, c) = carry, block
        z = a @ b
        if not recompute:
            products = jax.lax.dynamic_update_index_in_dim(products, z, step, 0)
        return _add_product(o, h(z), c), products

    products = None
    if not recompute:
        shape = jax.lax.axis_size(axis_name), a.shape[0], len(bs) * c.shape[0]
        products = vary(jnp.zeros(shape, a.dtype), varying_axes(a))
    o, products = ring.scan(body, _block(bs, c, 0, 1), (None, products), axis_name=axis_name)
    return _rounded(o, a.dtype), (a, bs, c, products)


def _backward(
    f: Any, axis_name: str, recompute: bool, saved: Any, do: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
    # Nothing is recomputed before the cotangent is there, nor merged with the forward pass and held until then.
    (a, bs, c, products), do = joint_barrier((saved, do))
    wide, count = accumulator(a.dtype), _pieces(a, bs, c) if recompute else 1

    def of_rows(da: Any, block: Any, step: Any) -> Any:
        b, c = block
        z = a @ b if recompute else jax.lax.dynamic_index_in_dim(products, step, 0, keepdims=False)
        h, pull = jax.vjp(_elementwise(f, len(bs), a.dtype), z)
        (dz,) = pull(do @ c.T)
        # The barrier makes XLA compute h and dz once, in one kernel; otherwise it may recompute them in each reader.
        h, dz = joint_barrier((h, dz))
        return _add_product(da, dz, b.T), h, dz

    def of_block(carry: Any, block: Any, step: Any) -> tuple[Any, Any]:
        da, h, dz = carry
        db = jnp.matmul(a.T, dz, preferred_element_type=wide)
        return da, (db, jnp.matmul(h.T, do, preferred_element_type=wide))

    da: Any = None if count == 1 else vary(_halves(jnp.zeros(a.shape, wide)), varying_axes(a))
    piece = lambda block, i: _block(block[0], block[1], i, count)
    body = of_rows, of_block
    da, (db, dc) = ring.collect(body, (bs, c), da, axis_name=axis_name, dtype=a.dtype, count=count, piece=piece)
    dbs = tuple(jnp.moveaxis(d, 0, 1).reshape(d.shape[1], -1) for d in jnp.split(db, len(bs), 2))
    return _rounded(da, a.dtype), dbs, dc.reshape(c.shape)


_product.defvjp(_forward, _backward)


def _pieces(a: jax.Array, bs: tuple[jax.Array, ...], c: jax.Array) -> int:
    """The number of pieces in which a block goes round, one after another, in the backward pass.

    Messages and products then do not exceed the sum of rows that is held anyway, while messages are large enough to be fast.
    """
    wide, narrow = accumulator(a.dtype)(0).itemsize, a.dtype.itemsize
    message = (sum(b.size for b in bs) + c.size) * (narrow + wide)
    products = (2 * len(bs) + 1) * a.shape[0] * c.shape[0] * narrow
    count = max(1, min((2 * message + products) // (a.size * wide), message // _LEAST_MESSAGE))
    return next(n for n in range(count, 0, -1) if c.shape[0] % n == 0)


def _block(bs: tuple[jax.Array, ...], c: jax.Array, index: Any, count: int) -> tuple[jax.Array, jax.Array]:
    """One of `count` pieces of what travels: columns of each b, side by side so that they are one matmul, and rows of c."""
    if count > 1:
        size = c.shape[0] // count
        bs = tuple(jax.lax.dynamic_slice_in_dim(b, index * size, size, 1) for b in bs)
        c = jax.lax.dynamic_slice_in_dim(c, index * size, size, 0)
    return (bs[0] if len(bs) == 1 else jnp.concatenate(bs, 1)), c


def _add_product(sums: Any, a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
    """`sums + a @ b`, one half of the rows at a time. `sums` is a pair of halves; None means zero.

    If XLA does not fuse the addition into the matmul, the temporary product is then half as large.
    """
    product = partial(jnp.matmul, preferred_element_type=accumulator(a.dtype))
    # The barrier makes XLA compute a once, in one kernel; otherwise it would recompute a in the kernels that slice it.
    a = barrier(a)
    first = product(_halves(a)[0], b)
    first = first if sums is None else sums[0] + first
    first, a = joint_barrier((first, a))
    second = product(_halves(a)[1], b)
    return first, second if sums is None else sums[1] + second


def _halves(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = -(-a.shape[0] // 2)
    return a[:half], a[half:]


def _rounded(sums: tuple[jax.Array, ...], dtype: Any) -> jax.Array:
    return jnp.concatenate([part.astype(dtype) for part in sums])


def _elementwise(f: Any, inputs: int, dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """`f` as a function of its `inputs` arguments side by side."""
    wide = accumulator(dtype)
    return lambda z: f(*jnp.split(z.astype(wide), inputs, 1)).astype(dtype)


_SHAPE = (3, 5)
_MIXING = (
    *("argm", "concatenate", "conv_general", "cum", "dot_general", "dynamic_slice", "fft", "gather", "iota", "rev"),
    *("reduce_and", "reduce_m", "reduce_or", "reduce_prod", "reduce_sum", "scatter", "slice", "sort", "top_k"),
    *("transpose", "psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute"),
)


def check_elementwise(name: str, f: Callable[..., Any]) -> None:
    """Raises unless `f` maps an array to one of its shape, each entry computed from the entry at the same place."""
    check.function(name, f, "pass one such as jax.nn.gelu")
    wanted = "an elementwise function of one array"
    blocks = "it sees only blocks of rows and columns"
    struct = jax.ShapeDtypeStruct(_SHAPE, jnp.float32)
    try:
        jaxpr, out = jax.make_jaxpr(f, return_shape=True)(struct)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be {wanted}, got {check.shown(f)} that raises {error}") from error
    except (NameError, AssertionError) as error:  # what JAX raises of an axis that only the surrounding transform knows
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(
            f"{name} must be {wanted}, got {check.shown(f)} that raises {said}: collectives combine entries of different places"
        ) from error
    if not isinstance(out, jax.ShapeDtypeStruct) or out.shape != _SHAPE:
        raise ValueError(f"{name} must be {wanted}, got {check.shown(f)} that returns {out} for {_SHAPE}: {blocks}")
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be {wanted}, got {check.shown(f)} that returns {out.dtype}: return floating-point numbers"
        )
    for primitive in _mixing(jaxpr.jaxpr):
        raise ValueError(
            f"{name} must be {wanted}, got {check.shown(f)} that combines entries of different places ({primitive}): {blocks}"
        )


def _mixing(jaxpr: Any) -> Iterator[str]:
    """Names of the primitives that combine entries of different places, or ask where an entry is."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        arrays = [v.aval for v in (*equation.invars, *equation.outvars)]
        if name.startswith(_MIXING) and any(getattr(a, "shape", None) == _SHAPE for a in arrays):
            yield name
        if name != "pallas_call":
            for inner in bodies(equation):
                yield from _mixing(inner)
