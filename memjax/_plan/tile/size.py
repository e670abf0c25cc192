"""How many positions a tile has."""

from __future__ import annotations

import math

from memjax._core.arrays import is_float
from memjax._core.positions.regions import Region
from memjax._core.positions.walk import shape_of
from memjax._core.program.costs import array_bytes

# Rows of a product in a tile. Each tile reads and writes the float32 sums of the gradients of what is shared: below these the
# traffic takes longer than the products.
_LEAST_ROWS = {"gpu": 1024, "tpu": 1024}
_LEAST_ROWS_ELSEWHERE = 128


# With so many rows the traffic of the sums takes 2% of the time of the products, by the rates of an H100: more gain nothing.
_ENOUGH_ROWS = 16384


def positions_per_tile(region: Region, platform: str, nbytes: int = 0) -> int:
    """As many that a tile of the product takes half of the sums of the shared values' gradients, which are in float32.

    Args:
      region: to be tiled.
      platform: of the device, as JAX calls it.
      nbytes: what a tile of the product may take, if that is more: fewer tiles read and write the sums less often.
    """
    product = region.product
    (contracted, _), left = product.params["dimension_numbers"][0], product.invars[0]
    shape, first = shape_of(product.outvars[0]), len(shape_of(left)) - len(contracted)
    rows = math.prod(shape[:first] if region.dim < first else shape[first:])
    sums = sum(4 * var.aval.size for var in region.shared if is_float(var.aval))
    of_row = max(array_bytes(product.outvars[0]) // rows, 1)
    wanted = max(sums // 2 // of_row, _LEAST_ROWS.get(platform, _LEAST_ROWS_ELSEWHERE))
    wanted = max(wanted, min(nbytes // of_row, _ENOUGH_ROWS))
    positions = max(wanted * region.length // rows, 1)
    return int(min(1 << (positions.bit_length() - 1), region.length))
