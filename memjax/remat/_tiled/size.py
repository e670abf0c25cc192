"""How many positions a tile has where the caller does not say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from memjax._core.segments import automatic_devices, shards

# Rows of matrix products in a tile. A tile adds to the gradients of the parameters, which reads and writes them: about
# 12 bytes a parameter, beside 6 FLOPs for each row and parameter. At 8,192 rows that is 5% of the time of an H200's
# products, and at 512 rows 2% of a CPU's.
_ROWS = {"gpu": 8192, "tpu": 8192}
_ROWS_ELSEWHERE = 512
_MULTIPLE = 128  # of which GPUs like rows to be


def default_tile(length: int, arrays: Sequence[Any], axes: Sequence[int]) -> int:
    """Positions per tile, tiles as equal as can be.

    Args:
      length: the number of positions.
      arrays: those with positions.
      axes: where they have them. The dimensions before are taken for examples, which multiply the rows.

    The rows of a device count. On a mesh of automatic axes examples and positions are taken to be spread over all of it.
    """
    types = list(map(jax.typeof, arrays))
    examples = max([math.prod(aval.shape[:axis]) for aval, axis in zip(types, axes, strict=True)], default=1)
    explicit = max(math.prod(shards(aval, i) for i in range(axis + 1)) for aval, axis in zip(types, axes, strict=True))
    rows = _ROWS.get(jax.default_backend(), _ROWS_ELSEWHERE) * explicit * (automatic_devices(types) or 1)
    wanted = max(1, rows // max(examples, 1))
    tiles = -(-length // wanted)
    tile = -(-length // max(tiles, 1))
    if tiles > 1 and tile > _MULTIPLE:
        tile = -(-tile // _MULTIPLE) * _MULTIPLE
    return max(1, min(tile, length))
