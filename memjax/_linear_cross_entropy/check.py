"""What `linear_cross_entropy` accepts, and what it says about the rest."""

from __future__ import annotations

import importlib.util
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax._linear_cross_entropy.options import Array, Operands, Options

_INT32 = jnp.iinfo(jnp.int32)
_NAMES = (
    *("full", "forward_grad", "forward_grad/jnp", "forward_grad/triton"),
    *("recompute", "recompute/jnp", "recompute/triton", "recompute/mosaic"),
)


def scalars(
    label_smoothing: Any, z_loss: Any, softcap: Any, logit_scale: Any, chunk: Any, ignore_index: Any
) -> dict[str, Any]:
    """The options that must be Python numbers, as such."""
    smoothing = _number("label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing: expected a number in [0, 1], got {smoothing}")
    cap = None if softcap is None else _number("softcap", softcap)
    if cap is not None and cap <= 0:
        raise ValueError(f"softcap: expected a positive number, or None for no cap, got {cap}")
    if not _is_integer(ignore_index):
        raise TypeError(f"ignore_index: expected an integer, got {ignore_index!r}")
    if chunk is not None and not _is_integer(chunk):
        raise TypeError(f"chunk: expected a positive integer, or None for the default, got {chunk!r}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected a positive integer, or None for the default, got {chunk}")
    return {
        "label_smoothing": smoothing,
        "z_loss": _number("z_loss", z_loss),
        "softcap": cap,
        "logit_scale": _number("logit_scale", logit_scale),
        "chunk": None if chunk is None else int(chunk),
    }


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _number(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        hint = "; for a traced scale, multiply x by it" if name == "logit_scale" else ""
        raise TypeError(f"{name}: expected a Python number, got {type(value).__name__} {value}{hint}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return float(value)


def arrays(x: Any, w: Any, labels: Any, layout: Any, bias: Any, weights: Any, axis_name: Any) -> int:
    """Shapes and dtypes; returns the size of the vocabulary over all devices."""
    for name, a in (("x", x), ("w", w), ("labels", labels), ("bias", bias), ("weights", weights)):
        if a is not None and not isinstance(a, jax.Array | np.ndarray):
            raise TypeError(f"{name}: expected an array, got {type(a).__name__}")
    if layout not in ("vd", "dv"):
        raise ValueError(f'layout: expected "vd" for a (V, D) head or "dv" for a (D, V) one, got {layout!r}')
    for name, a in (("x", x), ("w", w), ("bias", bias), ("weights", weights)):
        if a is not None and not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"{name}: expected a floating-point array, got {a.dtype}; convert it with .astype")
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        raise TypeError(f"x: expected bfloat16, float16, float32 or float64, got {x.dtype}")
    if w.dtype != x.dtype:
        raise TypeError(f"w: expected x's dtype {x.dtype}, got {w.dtype}; pass w.astype(x.dtype)")
    if w.ndim != 2:
        raise ValueError(f"w: expected 2 dimensions, got shape {w.shape}")
    if x.ndim < 1:
        raise ValueError("x: expected shape (..., D), got ()")
    dim, local = w.shape[layout.index("d")], w.shape[layout.index("v")]
    if x.shape[-1] != dim:
        other = "dv" if layout == "vd" else "vd"
        hint = f'; is w stored the other way (layout="{other}")?' if x.shape[-1] == local else ""
        raise ValueError(
            f'w: with layout="{layout}" its shape {w.shape} has D = {dim}, but x has shape {x.shape}{hint}'
        )
    if local < 1:
        raise ValueError(f"w: expected at least one vocabulary entry, got shape {w.shape}")
    if jnp.issubdtype(labels.dtype, jnp.floating):
        if labels.shape != (*x.shape[:-1], local):
            raise ValueError(
                f"labels: soft targets must have shape {(*x.shape[:-1], local)}, got {labels.shape}"
                "; for one class per token pass integers"
            )
    elif not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels: expected integers, or floating-point soft targets, got {labels.dtype}")
    elif labels.shape != x.shape[:-1]:
        raise ValueError(f"labels: expected shape {x.shape[:-1]} for x of shape {x.shape}, got {labels.shape}")
    if bias is not None and bias.shape != (local,):
        raise ValueError(f"bias: expected shape {(local,)}, got {bias.shape}")
    if weights is not None and weights.shape != x.shape[:-1]:
        raise ValueError(
            f"weights: expected one per token, shape {x.shape[:-1]}, got {weights.shape}"
            "; for weights per class pass class_weights[labels]"
        )
    return local if axis_name is None else local * lax.axis_size(axis_name)


def integer_labels(labels: Array, ignore_index: int, vocabulary: int) -> tuple[Array, Array, Array]:
    """(valid, labels as int32 with -1 for ignored ones, out of range), checked now if they are concrete."""
    wide = jnp.iinfo(labels.dtype)
    if wide.max > _INT32.max:
        fits = labels <= jnp.array(_INT32.max, labels.dtype)
        if wide.min < _INT32.min:
            fits = fits & (labels >= _INT32.min)
        never = vocabulary if ignore_index != vocabulary else vocabulary + 1
        labels = jnp.where(fits, labels, jnp.array(never, labels.dtype))
    labels = jnp.asarray(labels, jnp.int32)
    valid = labels != ignore_index if _INT32.min <= ignore_index <= _INT32.max else jnp.ones(labels.shape, bool)
    wrong = valid & ((labels < 0) | (labels >= vocabulary))
    if not isinstance(wrong, jax.core.Tracer) and wrong.any():
        bad = np.asarray(labels)[np.asarray(wrong)]
        raise ValueError(
            f"labels: expected values in [0, {vocabulary}) or ignore_index = {ignore_index},"
            f" got {int(bad[0])} ({bad.size} such labels)"
        )
    return valid, jnp.where(valid & ~wrong, labels, -1), wrong


def implementation(name: str | None, reduction: str, dtype: Any) -> tuple[str, tuple[str, ...]]:
    """(algorithm, kernels to choose from) for what was asked, or the best that runs here."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction: expected "mean", "sum" or "none", got {reduction!r}')
    if name is None:
        name = "recompute" if reduction == "none" else "forward_grad"
    if name not in _NAMES:
        raise ValueError(f"implementation: expected None or one of {', '.join(_NAMES)}, got {name!r}")
    algorithm, _, kernels = name.partition("/")
    if algorithm == "forward_grad" and reduction == "none":
        raise ValueError(
            'implementation: "forward_grad" needs a scalar loss, but reduction="none"; use "recompute" or "full"'
        )
    reasons = {"mosaic": _no_mosaic(dtype), "triton": _no_triton(dtype), "jnp": None}
    if not kernels:
        return algorithm, tuple(k for k, reason in reasons.items() if reason is None)
    if reasons[kernels]:
        raise ValueError(f"implementation: {name!r} cannot run here: {reasons[kernels]}; use {algorithm!r}")
    # Soft targets are left to jax.numpy by the Triton kernels.
    return algorithm, ("triton", "jnp") if kernels == "triton" else (kernels,)


def suited(operands: Operands, options: Options) -> None:
    """That the Mosaic kernels apply, where nothing else may be used."""
    if options.kernels == ("mosaic",):
        from memjax._linear_cross_entropy import hopper

        if reason := hopper.unsuited(operands, options):
            raise ValueError(f'implementation: "recompute/mosaic" cannot do this: {reason}; use "recompute"')


def _no_triton(dtype: Any) -> str | None:
    """Why the Triton kernels cannot run, or None."""
    if jax.default_backend() != "gpu":
        return f"Triton kernels need a GPU, and the default backend is {jax.default_backend()!r}"
    if importlib.util.find_spec("jax_triton") is None or importlib.util.find_spec("triton") is None:
        return "jax_triton is not installed (pip install 'memjax[gpu]')"
    if dtype == jnp.float64:
        return "Triton kernels keep float32 statistics, and x is float64"
    return None


def _no_mosaic(dtype: Any) -> str | None:
    """Why the Pallas kernels for Hopper GPUs cannot run, or None."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if jax.default_backend() != "gpu" or capability != "9.0":
        return f"Mosaic kernels need a Hopper GPU, and the default device is {jax.devices()[0].device_kind!r}"
    if jax.__version_info__ < (0, 11):
        return f"Mosaic kernels need JAX 0.11 or later, and this is {jax.__version__}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"Mosaic kernels take bfloat16 and float16, and x is {dtype}"
    return None
