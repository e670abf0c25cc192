"""Blocks that the user gives: where one ends, and the next begins, the program is cut.

A name on what a block hands on says so in the program, and through everything that JAX does to it.
"""

from __future__ import annotations

from typing import Any

from jax.ad_checkpoint import checkpoint_name

from memjax._core.compat import primitive_name
from memjax._core.lists import Arrays
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import NAMES

_END = "memjax: the end of a block"


def end_of_block(arrays: Arrays) -> Arrays:
    """What a block hands on, marked as such."""
    return [checkpoint_name(array, _END) for array in arrays]


def ends_of_blocks(program: Program) -> list[int]:
    """Numbers of equations, or of all, before which a block has ended."""
    ends = [*map(_is_end, program.eqns), False]
    return [i + 1 for i in range(len(program.eqns)) if ends[i] and not ends[i + 1]]


def _is_end(eqn: Any) -> bool:
    if primitive_name(eqn) not in NAMES:
        return False
    held = eqn.params.get("_prim")  # with jax_remat3
    return (eqn.params["name"] if held is None else held.name) == _END
