"""What the implementations share: the static options, the arrays, chunk sizes, and a loop over chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from memjax._core import check
from memjax._core.barriers import joint_barrier

Array = jax.Array
Axes = tuple[str, ...]  # of a mesh


@dataclass(frozen=True)
class Options:
    """Everything about one call that is known when it is traced."""

    layout: str  # "vd": w is (V, D); "dv": w is (D, V)
    vocabulary: int  # over all devices of `axis_name`
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    chunk: int | None
    axis_name: str | tuple[str, ...] | None
    aux: bool
    kernels: tuple[str, ...]  # "mosaic", "triton", "jnp": the first that suits is used
    choose: bool = False  # whether the gradients of a sum may be those of "recompute", where that is faster


class Operands(NamedTuple):
    """The arrays of one call. `labels` are columns of the whole vocabulary, -1 for none.

    Algorithms get tokens flattened, in N rows; up to `programs` N stands for as many dimensions as the user's tokens have.
    """

    x: Array  # (N, D)
    w: Array  # (V, D) or (D, V)
    bias: Array | None  # (V,)
    labels: Array  # (N,) int32; with soft targets their largest entry, used by aux only
    targets: Array | None  # (N, V) soft targets
    scale: Array | None  # (N,) what each token's loss is multiplied by; None where the losses are not summed
    class_weights: Array | None  # (V,) factors of the targets; None where they are already part of `scale`


def with_rows(operands: Operands) -> Operands:
    """Operands with the shape of x that algorithms see, for choices by shapes alone."""
    *tokens, dim = operands.x.shape
    x: Any = jax.ShapeDtypeStruct((math.prod(tokens), dim), operands.x.dtype)
    return operands._replace(x=x)


class Chunk(NamedTuple):
    """Products of some tokens with some columns of the head, and what belongs to these tokens and columns."""

    products: Array  # (n, c), in x's dtype
    bias: Array | None  # (c,)
    labels: Array  # (n,), counted from the chunk's first column; those outside match nothing
    targets: Array | None  # (n, c)
    class_weights: Array | None  # (c,)


class Result(NamedTuple):
    """`loss` is this device's share: summed over `axis_name` it is the loss. The other fields are equal on all devices."""

    loss: Array  # () or (N,)
    lse: Array  # (N,)
    correct: Array | None  # (N,) 1.0 where no logit is larger than the label's
    entropy: Array | None  # (N,) of the predicted distribution, in nats


@jax.custom_jvp
def scaled(scale: Array, losses: Array) -> Array:
    """scale * losses, and 0 wherever the scale is 0: an ignored token's loss may be NaN."""
    return jnp.where(scale == 0, 0.0, scale * losses)


def _scaled_jvp(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    """The derivative of `scaled`. That with respect to a scale of 0 is still the token's loss."""
    (scale, losses), (d_scale, d_losses) = primals, tangents
    still = [isinstance(d, SymbolicZero) for d in tangents]
    d = jnp.zeros_like(losses) if still[1] else jnp.where(scale == 0, 0.0, scale * d_losses)
    return scaled(scale, losses), d if still[0] else d + d_scale * losses


scaled.defjvp(_scaled_jvp, symbolic_zeros=True)


def psum(a: Array, axis_name: str | tuple[str, ...] | None) -> Array:
    """The sum over devices of `axis_name`, if there is one."""
    return a if axis_name is None else lax.psum(a, axis_name)


def as_entry(axes: Axes) -> Any:
    """The axes as an entry of a `PartitionSpec`."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def as_axes(entry: Any) -> Axes:
    """The inverse of `as_entry`."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def columns(operands: Operands, options: Options) -> int:
    """Columns of the vocabulary on this device."""
    return operands.w.shape[options.layout.index("v")]


def matmul(equation: str, a: Array, b: Array, options: Options, dtype: Any) -> Array:
    """`einsum` in which "vd" stands for the head, whichever way it is stored. Operands are never cast."""
    return jnp.einsum(equation.replace("vd", options.layout), a, b, preferred_element_type=dtype)


def head_gradient(d: Array, x: Array, options: Options, dtype: Any) -> Array:
    """d^T x, stored as the head is."""
    if options.layout == "vd":
        return matmul("nv,nd->vd", d, x, options, dtype)
    return matmul("nd,nv->vd", x, d, options, dtype)


def head_columns(w: Array, start: Any, size: int, options: Options) -> Array:
    """The rows of a (V, D) head, or columns of a (D, V) one, of `size` entries of the vocabulary."""
    return lax.dynamic_slice_in_dim(w, start, size, options.layout.index("v"))


def _power_of_two_up_to(limit: int) -> int:
    return 1 << max(limit.bit_length() - 1, 0)


def token_chunk(operands: Operands, options: Options) -> int:
    """Tokens per chunk: D rounded down to a power of two, so that a chunk of bf16 logits takes at most half
    of the float32 gradient of the head, but at least 1024 on a GPU (below, that gradient's traffic exceeds
    its matmul) and 128 elsewhere."""
    tokens, dim = operands.x.shape
    if not isinstance(tokens, int):
        fix = 'implementation="recompute" takes symbolic numbers'
        raise check.fail(ValueError, "x", "of a number of tokens known when tracing", operands.x, fix)
    least = 128 if options.kernels == ("jnp",) else 1024
    return min(options.chunk or max(_power_of_two_up_to(dim), least), tokens)


def vocabulary_chunk(operands: Operands, options: Options, chunk: int | None) -> int:
    """Vocabulary entries per chunk.

    By default, the entries whose logits take 8 D bytes per token, rounded down to a power of two, but at least 1024. Unless this
    minimum applies, the logits of a chunk take at most twice the bytes of the float32 gradient of x.
    """
    default = max(_power_of_two_up_to(8 * operands.x.shape[1] // operands.x.dtype.itemsize), 1024)
    return min(chunk or default, columns(operands, options))


def for_chunks(body: Callable[[Any, Any, int], Any], carry: Any, stop: int, chunk: int) -> Any:
    """Repeats `carry = body(carry, start, size)` over [0, stop), in chunks of size `chunk`. A smaller remainder comes first.

    The chunks after the first run in one loop. The first call may add entries to the carry, such as sums; later calls must
    keep its structure.
    """
    first = stop % chunk or min(chunk, stop)
    carry = body(carry, 0, first)
    equal = (stop - first) // chunk
    if equal == 1:
        carry = body(carry, after(carry, first), chunk)
    elif equal > 1:
        carry, _ = lax.scan(
            lambda c, i: (body(c, first + i * chunk, chunk), None), carry, jnp.arange(equal, dtype=jnp.int32)
        )
    return carry


def after(carry: Any, start: int) -> Array:
    """Makes `start` depend on `carry`: otherwise XLA merges matmuls that share an operand, and holds two chunks at once."""
    leaf = jax.tree.leaves(carry)[0]
    return joint_barrier((jnp.asarray(start, jnp.int32), leaf[(0,) * leaf.ndim]))[0]
