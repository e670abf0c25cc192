"""Gradients of picked logits: a scatter of one value to each row of zeros, as a comparison of labels with columns.

A compiler fuses that with the gradient of the softmax, where a scatter makes it write all of this, in float32, before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from memjax._core.compat import primitive_name
from memjax._core.positions.walk import shape_of


def column_of(eqn: Any) -> int | None:
    """The dimension along which the equation puts one value into each row; None if it does anything else."""
    if primitive_name(eqn) not in ("scatter-add", "scatter_add"):
        return None
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = map(shape_of, eqn.invars)
    rows = [dim for dim in range(len(operand)) if dim not in numbers.inserted_window_dims]
    one = (
        len(numbers.inserted_window_dims) == 1
        and tuple(numbers.scatter_dims_to_operand_dims) == tuple(numbers.inserted_window_dims)
        and list(numbers.operand_batching_dims) == rows
        and list(numbers.scatter_indices_batching_dims) == list(range(len(rows)))
        and not numbers.update_window_dims
        and math.prod(updates) == math.prod(operand[dim] for dim in rows)
        and math.prod(indices) == math.prod(updates)
        and eqn.params["mode"] != lax.GatherScatterMode.CLIP
    )
    return int(numbers.inserted_window_dims[0]) if one else None


def scattered(column: int, shape: Sequence[int], labels: Any, values: Any) -> Any:
    """Zeros of that shape, but for `values` where the position along `column` is the label of the row."""
    wide = [1 if dim == column else size for dim, size in enumerate(shape)]
    labels, values = labels.reshape(wide), values.reshape(wide)
    if labels.dtype.itemsize < 4:  # columns may be more than it can count
        labels = labels.astype(jnp.int32)
    picked = lax.broadcasted_iota(labels.dtype, tuple(shape), column) == labels
    return lax.select(picked, jnp.broadcast_to(values, shape), jnp.zeros(shape, values.dtype))
