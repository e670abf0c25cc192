"""The parallelisms that METP is compared with, in its style and with its kernels: local functions for `jax.shard_map`.

- Megatron tensor parallelism (Shoeybi et al. 2019): `tensor_parallel_mlp`; every device holds all tokens.
- The same with sequence parallelism outside the matmuls (Korthikanti et al. 2022): `sequence_parallel_mlp`.
- Ulysses (Jacobs et al. 2024): `ulysses_attention`, tokens exchanged for heads.
- Fully sharded data parallelism (Zhao et al. 2023) for what goes with Ulysses and ring attention: `gathered_mlp`.
Ring attention (Liu et al. 2023) is `metp_attention`. Gradients are those of automatic differentiation, so what the
matmuls take is saved; wrap the functions in `jax.checkpoint` to gather and multiply again instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core import check
from memjax.shard._attention import attention as attention
from memjax.shard._metp import check_elementwise

Array = jax.Array
Activation = Callable[[Array], Array]
_ATTENTION_OPTIONS = ("causal", "segment_ids", "window", "scale", "softcap", "implementation")


def tensor_parallel_mlp(
    x: Array,
    w_in: Array,
    w_out: Array,
    *,
    activation: Activation = jax.nn.gelu,
    w_gate: Array | None = None,
    axis_name: str,
) -> Array:
    """All tokens (..., S, D) on every device, columns of `w_in` and rows of `w_out` here; the outputs are added up.

    Saved: x, and S F/p entries for each input of the activation and for its output. An x that JAX takes to differ between
    devices is refused.

    With `jax.shard_map(check_vma=False)` values are right, and gradients taken outside of it. Taken inside, they are p times as
    large, as those of any function that ends in a `psum`: divide them by p. The gradient of x is then this device's part of it.
    """
    _check_mlp(x, w_in, w_out, w_gate, activation, axis_name)
    check.same("x", x, axis_name)
    return lax.psum(mlp(x, w_in, w_out, activation, w_gate), axis_name)


def sequence_parallel_mlp(
    x: Array,
    w_in: Array,
    w_out: Array,
    *,
    activation: Activation = jax.nn.gelu,
    w_gate: Array | None = None,
    axis_name: str,
) -> Array:
    """This device's tokens (..., T, D), gathered before the matmuls and scattered after them.

    Saved: x, and S F/p entries for each input of the activation and for its output.
    """
    _check_mlp(x, w_in, w_out, w_gate, activation, axis_name)
    check.sharded("x", x, axis_name)
    if x.ndim == 2:
        return sequence_parallel_mlp(x[None], w_in, w_out, activation=activation, w_gate=w_gate, axis_name=axis_name)[0]
    return scattered(mlp(gathered_tokens(x, axis_name), w_in, w_out, activation, w_gate), axis_name)


def gathered_mlp(
    x: Array,
    w_in: Array,
    w_out: Array,
    *,
    activation: Activation = jax.nn.gelu,
    w_gate: Array | None = None,
    axis_name: str,
) -> Array:
    """This device's tokens (..., T, D); weights are gathered whole. Saved: x, the weights, T F entries several times."""
    _check_mlp(x, w_in, w_out, w_gate, activation, axis_name)
    columns = lambda w: None if w is None else gathered_weight(w, axis_name, 1)
    return mlp(
        x, gathered_weight(w_in, axis_name, 1), gathered_weight(w_out, axis_name, 0), activation, columns(w_gate)
    )


def ulysses_attention(q: Array, k: Array, v: Array, *, axis_name: str, **options: Any) -> Array:
    """Attention of a sequence that lies contiguously on p devices, which exchange tokens for heads and back.

    In between each device has all tokens of some heads. `options` are those of `attention`, segment ids of the whole sequence.

    Key-value heads fewer than p are repeated to p.

    Raises:
      ValueError: query heads that p does not divide, or key-value heads that neither divide p nor are divided by it.
    """
    size = check.axis_size("axis_name", axis_name)
    for name, a in (("q", q), ("k", k), ("v", v)):
        check.array(name, a, ndim=4, floating=True, fix="pass (batch, tokens, heads, head_dim)")
        check.sharded(name, a, axis_name)
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % size or not heads:
        raise check.fail(ValueError, "q", f"of heads that the {size} devices of {axis_name!r} divide", q)
    if kv_heads % size or not kv_heads:
        if not kv_heads or size % kv_heads:
            raise check.fail(ValueError, "k", f"of heads that {size} devices divide, or a divisor of them", k)
        k, v = (jnp.repeat(a, size // kv_heads, 2) for a in (k, v))
    if unknown := options.keys() - _ATTENTION_OPTIONS:
        wanted = f"options of attention: {', '.join(_ATTENTION_OPTIONS)}"
        raise check.fail(TypeError, "options", wanted, sorted(unknown)[0], "layout and groups of heads are METP's")
    to_heads = lambda a: lax.all_to_all(a, axis_name, 2, 1, tiled=True)
    o = attention(to_heads(q), to_heads(k), to_heads(v), **options)
    return lax.all_to_all(o, axis_name, 1, 2, tiled=True)


def _check_mlp(x: Any, w_in: Any, w_out: Any, w_gate: Any, activation: Any, axis_name: Any) -> None:
    check.axis_size("axis_name", axis_name)
    check_elementwise("activation", activation)
    check.array("x", x, floating=True)
    check.local("x", x)
    if x.ndim < 2:
        raise check.fail(ValueError, "x", "of shape (..., tokens, D)", x)
    for name, w in (("w_in", w_in), ("w_gate", w_gate), ("w_out", w_out)):
        if w is not None or name != "w_gate":
            check.array(name, w, ndim=2, floating=True)
            check.sharded(name, w, axis_name)
    if w_in.shape != (x.shape[-1], w_out.shape[0]):
        raise check.fail(ValueError, "w_in", f"of shape {(x.shape[-1], w_out.shape[0])}, as x and w_out are", w_in)
    if w_gate is not None and w_gate.shape != w_in.shape:
        raise check.fail(ValueError, "w_gate", f"of w_in's shape {w_in.shape}", w_gate)


def mlp(x: Array, w_in: Array, w_out: Array, activation: Activation, w_gate: Array | None = None) -> Array:
    """`activation(x w_in) w_out` or `(activation(x w_gate) * (x w_in)) w_out` on one device."""
    check.function("activation", activation, "pass one such as jax.nn.gelu")
    for name, a in (("x", x), ("w_in", w_in), ("w_out", w_out)):
        check.array(name, a)
    # Of the elementwise part only the inputs are kept, as a fused kernel would.
    if w_gate is None:
        return jax.checkpoint(activation)(x @ w_in) @ w_out
    return jax.checkpoint(lambda gate, up: activation(gate) * up)(x @ w_gate, x @ w_in) @ w_out


def gathered_tokens(x: Array, axis_name: str) -> Array:
    """(B, T, ...) -> (B, S, ...); its transpose scatters."""
    check.axis_size("axis_name", axis_name)
    check.array("x", x)
    return lax.all_gather(x, axis_name, axis=1, tiled=True)


def scattered(x: Array, axis_name: str) -> Array:
    """(B, S, ...) -> (B, T, ...), the sum over devices; its transpose gathers."""
    size = check.axis_size("axis_name", axis_name)
    if check.array("x", x).ndim < 2 or x.shape[1] % size:
        raise check.fail(ValueError, "x", f"of a number of tokens (axis 1) that {size} devices divide", x)
    return lax.psum_scatter(x, axis_name, scatter_dimension=1, tiled=True)


def gathered_weight(w: Array, axis_name: str, axis: int) -> Array:
    """The whole of a weight of which this device holds a part along `axis`."""
    check.axis_size("axis_name", axis_name)
    if not 0 <= check.integer("axis", axis) < check.array("w", w).ndim:
        raise check.fail(ValueError, "axis", f"one of the {w.ndim} axes of w", axis)
    return lax.all_gather(w, axis_name, axis=axis, tiled=True)
