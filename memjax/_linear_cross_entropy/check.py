"""What `linear_cross_entropy` accepts, and what it says about the rest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check
from memjax._core.compat import is_tracer, varying
from memjax._core.platforms import no_jax_triton, traced_device
from memjax._linear_cross_entropy.options import Array, Operands, Options

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
_NAMES = (
    *("full", "forward_grad", "forward_grad/jnp", "forward_grad/triton"),
    *("recompute", "recompute/jnp", "recompute/triton", "recompute/mosaic"),
)


def scalars(
    label_smoothing: Any, z_loss: Any, softcap: Any, logit_scale: Any, chunk: Any, ignore_index: Any
) -> dict[str, Any]:
    """The options that must be Python numbers, as such."""
    check.integer("ignore_index", ignore_index)
    none = "pass None for no cap"
    schedule = "kernels are compiled with it; for a schedule mix the losses of two values, in which the loss is linear"
    return {
        "label_smoothing": check.number("label_smoothing", label_smoothing, least=0, most=1, fix=schedule),
        "z_loss": check.number("z_loss", z_loss, fix=schedule),
        "softcap": None if softcap is None else check.number("softcap", softcap, positive=True, fix=none),
        "logit_scale": check.number("logit_scale", logit_scale, fix="for a traced scale, multiply x by it"),
        "chunk": None if chunk is None else check.integer("chunk", chunk, least=1, fix="or None for the default"),
    }


def axes(name: str, value: Any) -> tuple[str, ...]:
    """The mesh axes of an `axis_name`, all of a surrounding `jax.shard_map`."""
    if value is None:
        return ()
    names = value if isinstance(value, tuple) else (value,)
    if not names:
        raise check.fail(ValueError, name, "None, the name of a mesh axis or a tuple of such names", value)
    for axis in names:
        check.axis_size(name, axis)
    if len(set(names)) < len(names):
        raise check.fail(ValueError, name, "different mesh axes", value)
    return names


def arrays(x: Any, w: Any, labels: Any, layout: Any, bias: Any, weights: Any, class_weights: Any, devices: int) -> int:
    """Shapes and dtypes; returns the size of the vocabulary over all `devices` that share it."""
    for name, a in (("x", x), ("w", w), ("labels", labels)):
        check.array(name, a)
    floats = (("x", x), ("w", w), ("bias", bias), ("weights", weights), ("class_weights", class_weights))
    for name, a in floats:
        if a is not None:
            check.array(name, a, floating=True)
    if layout not in ("vd", "dv"):
        raise check.fail(ValueError, "layout", '"vd" for a (V, D) head or "dv" for a (D, V) one', layout)
    if x.dtype not in _DTYPES:
        raise check.fail(TypeError, "x", "of bfloat16, float16, float32 or float64", x)
    if w.dtype != x.dtype:
        raise check.fail(TypeError, "w", f"of x's dtype {x.dtype}", w, "pass w.astype(x.dtype)")
    check.array("w", w, ndim=2, fix="pass the head's matrix, (V, D), or (D, V) with layout='dv'")
    if x.ndim < 1 or x.shape[-1] < 1:
        raise check.fail(ValueError, "x", "of shape (..., D) with D at least 1", x)
    dim, local = w.shape[layout.index("d")], w.shape[layout.index("v")]
    if not isinstance(dim, int) or not isinstance(local, int):
        raise check.fail(
            ValueError, "w", "of a shape known when tracing", w, "only the number of tokens may be symbolic"
        )
    if x.shape[-1] != dim:
        other = "dv" if layout == "vd" else "vd"
        stored = f'if it is stored the other way, pass layout="{other}"' if x.shape[-1] == local else ""
        wanted = f"{'of shape (V, D)' if layout == 'vd' else 'of shape (D, V)'} with x's D = {x.shape[-1]}"
        raise check.fail(ValueError, "w", wanted, w, stored)
    if local < 1:
        raise check.fail(ValueError, "w", "a head with at least one vocabulary entry", w)
    tokens = x.shape[:-1]
    if jnp.issubdtype(labels.dtype, jnp.floating):
        if labels.shape != (*tokens, local):
            wanted = f"integers of shape {tokens} or soft targets of shape {(*tokens, local)}"
            raise check.fail(ValueError, "labels", wanted, labels)
    elif not jnp.issubdtype(labels.dtype, jnp.integer):
        raise check.fail(TypeError, "labels", "integers, or floating-point soft targets", labels)
    elif labels.shape != tokens:
        raise check.fail(ValueError, "labels", f"of shape {tokens}, one for each token of x", labels)
    if bias is not None and bias.shape != (local,):
        raise check.fail(ValueError, "bias", f"of shape {(local,)}, one for each vocabulary entry of w", bias)
    if weights is not None and weights.shape != tokens:
        hint = "for weights of classes, pass class_weights"
        raise check.fail(ValueError, "weights", f"of shape {tokens}, one for each token", weights, hint)
    if class_weights is not None and class_weights.shape != (devices * local,):
        wanted = f"of shape {(devices * local,)}, one for each entry of the whole vocabulary"
        raise check.fail(ValueError, "class_weights", wanted, class_weights)
    return devices * local


def sharded(
    axes: tuple[str, ...], token_axes: tuple[str, ...], x: Any, w: Any, labels: Any, bias: Any, soft: bool
) -> None:
    """Raises unless what is to differ between devices does."""
    if set(axes) & set(token_axes):
        wanted = f"other mesh axes than axis_name's {axes}, over which all devices have the same tokens"
        raise check.fail(
            ValueError, "token_axis_name", wanted, token_axes, "memjax.shard.vocab_cross_entropy shards both"
        )
    for axis in axes:
        check.sharded("w", w, axis)
        if bias is not None:
            check.sharded("bias", bias, axis)
        if soft:
            check.sharded("labels", labels, axis)
    for axis in token_axes:
        if axis not in varying(jax.typeof(labels)):
            check.sharded("x", x, axis)


def same_on_all(axis_name: Any, **given: Any) -> None:
    """That the devices which share a vocabulary have the same tokens. Soft targets are a part of it."""
    for axis in axes("axis_name", axis_name):
        for name, a in given.items():
            if name != "labels" or jnp.issubdtype(a.dtype, jnp.integer):
                check.same(name, a, axis)


def integer_labels(labels: Array | np.ndarray, ignore_index: int, vocabulary: int) -> tuple[Any, Any, Any]:
    """(valid, labels as int32 with -1 for ignored ones, out of range), checked now if they are concrete.

    All comparisons are made in the labels' own dtype, NumPy's by NumPy: what is cast first wraps.
    """
    info = jnp.iinfo(labels.dtype)
    xnp: Any = np if isinstance(labels, np.ndarray) else jnp
    typed = lambda value: xnp.asarray(value, labels.dtype)
    nowhere = xnp.zeros(labels.shape, bool)
    valid = labels != typed(ignore_index) if info.min <= ignore_index <= info.max else ~nowhere
    wrong = nowhere
    if info.min < 0:
        wrong = wrong | (labels < typed(0))
    if vocabulary <= info.max:
        wrong = wrong | (labels >= typed(vocabulary))
    wrong = valid & wrong
    if not is_tracer(wrong) and wrong.any():
        bad = np.asarray(labels)[np.asarray(wrong)]
        where = tuple(int(i) for i in np.argwhere(np.asarray(wrong))[0])
        raise ValueError(
            f"labels must be in [0, {vocabulary}) or equal to ignore_index = {ignore_index}, got {int(bad[0])} at {where}"
            f" ({bad.size} such labels): mend them, or pass ignore_index={int(bad[0])} to leave these tokens out"
        )
    hard = xnp.where(valid & ~wrong, labels, typed(0)).astype(xnp.int32)
    return valid, xnp.where(valid & ~wrong, hard, xnp.int32(-1)), wrong


def implementation(name: str | None, reduction: Any, dtype: Any) -> tuple[str | None, tuple[str, ...]]:
    """(algorithm, kernels to choose from) for what was asked; None is for the best algorithm."""
    check.choice("reduction", reduction, ("mean", "sum", "none"))
    check.choice("implementation", name, (None, *_NAMES))
    algorithm, _, kernels = (name or "").partition("/")
    if algorithm == "forward_grad" and reduction == "none":
        raise ValueError(
            f'implementation must be "recompute" or "full" with reduction="none", got {name!r}: its gradients are computed'
            " with the loss, for the sum of all losses"
        )
    reasons = {"mosaic": _no_mosaic(dtype), "triton": _no_triton(dtype), "jnp": None}
    if not kernels:
        return algorithm or None, tuple(k for k, reason in reasons.items() if reason is None)
    if reasons[kernels]:
        raise ValueError(
            f"implementation must be one that runs here, got {name!r}: {reasons[kernels]}; use {algorithm!r}"
        )
    # Soft targets are left to jax.numpy by the Triton kernels.
    return algorithm, ("triton", "jnp") if kernels == "triton" else (kernels,)


def suited(operands: Operands, options: Options) -> None:
    """Raises unless the Mosaic kernels apply, where nothing else may be used."""
    if options.kernels == ("mosaic",):
        from memjax._linear_cross_entropy.gpu import hopper

        if reason := hopper.unsuited(operands, options):
            raise ValueError(
                f'implementation must be one that can do this, got "recompute/mosaic": {reason}; use "recompute"'
            )


def _no_triton(dtype: Any) -> str | None:
    """Why the Triton kernels cannot run, or None."""
    if (platform := traced_device().platform) != "gpu":
        return f"Triton kernels need a GPU, and the program is for a {platform}"
    if missing := no_jax_triton():
        return missing
    if dtype == jnp.float64:
        return "Triton kernels keep float32 statistics, and x is float64"
    return None


def _no_mosaic(dtype: Any) -> str | None:
    """Why the Pallas kernels for Hopper GPUs cannot run, or None."""
    device = traced_device()
    if device.platform != "gpu" or device.compute_capability != "9.0":
        return f"Mosaic kernels need a Hopper GPU, and the program is for {device.device_kind!r}"
    if jax.__version_info__ < (0, 11):
        return f"Mosaic kernels need JAX 0.11 or later, and this is {jax.__version__}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"Mosaic kernels take bfloat16 and float16, and x is {dtype}"
    return None
