"""What the modules of NNX and Linen share: layers of a `Sequential`, and an RNN's scan over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memjax._core import check
from memjax._core.clear_errors import call_errors
from memjax._core.compat import is_tracer


def check_layers(layers: Any, module: type) -> None:
    """Raises unless all layers are functions or instances of modules."""
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise check.fail(TypeError, "layers", "a sequence of modules and functions", layers)
    if not layers:
        raise check.fail(ValueError, "layers", "at least one module or function", layers)
    for i, layer in enumerate(layers):
        is_other = isinstance(layer, nn.Module | nnx.Module) and not isinstance(layer, module)
        if is_other or not callable(layer):
            fix = "memjax.remat.Chain takes modules of NNX, memjax.remat.linen.Chain those of Linen" if is_other else ""
            raise check.fail(TypeError, f"layers[{i}]", "a module or a function", layer, fix)
        check.function(f"layers[{i}]", layer)


def call(layer: Callable[..., Any], x: Any) -> Any:
    """The output of a layer: a tuple gives its arguments, a dict its keyword arguments, anything else its one argument."""
    with call_errors("layers", layer, {"an input": x}):
        if isinstance(x, tuple):
            return layer(*x)
        return layer(**x) if isinstance(x, Mapping) else layer(x)


def run_cell(
    scan: Callable[..., tuple[Any, Any]],
    inputs: jax.Array,
    carry: Any,
    initial_carry: Callable[[tuple[int, ...]], Any],
    feature_axes: int,
    seq_lengths: Any,
    flip_sequences: Callable[..., jax.Array],
    *,
    return_carry: bool,
    time_major: bool,
    reverse: bool,
    keep_order: bool,
) -> Any:
    """Flax's `RNN.__call__` around another scan.

    `scan(wrap, carry, xs, reverse)` scans `wrap(cell)` over rows of `xs`; `initial_carry(shape)` makes a carry for inputs
    of one step.
    """
    time = 0 if time_major else inputs.ndim - (feature_axes + 1)
    batch_axes = inputs.ndim - feature_axes - 1
    length = inputs.shape[time]
    if seq_lengths is not None:
        batch = inputs.shape[1 : inputs.ndim - feature_axes] if time_major else inputs.shape[: -feature_axes - 1]
        if not jnp.issubdtype(check.array("seq_lengths", seq_lengths).dtype, jnp.integer) or seq_lengths.shape != batch:
            raise check.fail(TypeError, "seq_lengths", f"integers of shape {batch}, one for each sequence", seq_lengths)
        known = None if is_tracer(seq_lengths) else np.asarray(seq_lengths)
        if known is not None and not np.all((known >= 0) & (known <= length)):
            raise check.fail(ValueError, "seq_lengths", f"in [0, {length}], the steps of inputs", known.tolist())
    carry = initial_carry(inputs.shape[:time] + inputs.shape[time + 1 :]) if carry is None else carry

    def flip(x):
        return flip_sequences(x, seq_lengths, num_batch_dims=batch_axes, time_major=time_major)

    # Without padding the scan itself runs backwards, and the inputs are not copied.
    backwards = reverse and seq_lengths is None
    if reverse and not backwards:
        inputs = flip(inputs)
    xs = jnp.moveaxis(inputs, time, 0)
    carry = check.arrays("initial_carry", carry)

    def step_of(cell, carry, x):
        with call_errors("cell", type(cell), {"a carry": carry, "inputs of one step": x}):
            return cell(carry, x)

    if seq_lengths is None or not return_carry:
        carry, ys = scan(lambda cell: partial(step_of, cell), carry, xs, backwards)
    else:
        final = (jnp.minimum(seq_lengths, length) - 1) % length

        def wrap(cell):
            def step(carry, x):
                carry, last = carry
                x, i = x
                carry, y = step_of(cell, carry, x)
                return (
                    carry,
                    jax.tree.map(lambda new, old: jnp.where(_like(i == final, new), new, old), carry, last),
                ), y

            return step

        # Zeros of the carry's own kind.
        start = (carry, jax.tree.map(jnp.zeros_like, carry))
        (_, carry), ys = scan(wrap, start, (xs, jnp.arange(length, dtype=seq_lengths.dtype)), backwards)
    outputs = jax.tree.map(lambda y: jnp.moveaxis(y, 0, time), ys)
    if backwards and not keep_order:
        outputs = jax.tree.map(lambda y: jnp.flip(y, time), outputs)
    if reverse and not backwards and keep_order:
        outputs = jax.tree.map(flip, outputs)
    return (carry, outputs) if return_carry else outputs


def check_inputs(inputs: Any, feature_axes: int) -> None:
    if check.array("inputs", inputs).ndim < feature_axes + 1:
        raise check.fail(
            ValueError, "inputs", f"an array of at least {feature_axes + 1} axes, time and features", inputs
        )


def flags_of_call(module: Any, **flags: Any) -> dict[str, bool]:
    """The flags that a module is called with, checked; those that are None are the module's."""
    flags = {name: getattr(module, name) if value is None else value for name, value in flags.items()}
    return {name: check.flag(name, value) for name, value in flags.items()}


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
