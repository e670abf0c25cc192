"""What to do with each value that the backward pass wants: keep it, encode it, or compute it again from others.

What `jax.vjp` saves is redundant. A batch norm saves its input twice, less its mean and times two; a ReLU a mask besides
its output, and zeros; a matrix product an input that is there anyway, cast. So large residuals are traced back, through
operations that move no value far and that are cheap to repeat, to where they come from:

    an input that is kept       computed again from it                                          origins.py
    parameters                  computed again, if only moved or cast; otherwise kept           parameters.py
    smaller integers            computed again, if that is cheap: images, which are data anyway integers.py
    constants                   computed again
    a mask x > 0                from max(x, 0) if that is encoded by a codec that keeps zeros,  masks.py
                                or else kept bit by bit
    floats                      residuals that come from one array are computed again from it,
                                and that is encoded
    statistics                  kept: sums of a softmax, deviations of a norm                   statistic.py
    other dtypes, small arrays  kept
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from memjax._core.jaxpr import Program, is_literal, nbytes, variables
from memjax.compress._codecs.codec import DTYPES
from memjax.compress._transform.keep.deviations import Scale, scale_of_norm
from memjax.compress._transform.keep.integers import integer_sources
from memjax.compress._transform.keep.masks import masks_of_nonzero
from memjax.compress._transform.keep.origins import Origins
from memjax.compress._transform.keep.parameters import Parameters
from memjax.compress._transform.keep.statistic import is_statistic
from memjax.compress._transform.keep.which import SMALL, Which


@dataclasses.dataclass(frozen=True)
class Keep:
    """Variables of a program, by what is kept of them.

    Attributes:
      whole: kept as they are.
      encoded: kept as codes.
      scales: the deviations of the channels of those variables in `encoded` that a batch norm reads.
      masks: kept as bits.
      nonzero: for each mask that is computed again, the variable in `encoded` that is not zero where the mask is true.
      origins: for each residual that is, or is computed again from, a variable in `encoded`, that variable.
      matched: whether the user's selection matched any residual, small or large.
      refused: variables that are not encoded because their codes would be larger.
    """

    whole: list[Any]
    encoded: list[Any]
    scales: dict[Any, Scale]
    masks: list[Any]
    nonzero: dict[Any, Any]
    origins: dict[Any, Any]
    matched: bool
    refused: list[Any]


def choose(
    program: Program,
    residuals: Sequence[Any],
    lasting: Sequence[Any],
    which: Which,
    code_nbytes: Callable[[Any], int],
    *,
    keeps_zeros: bool,
) -> Keep:
    """What to keep, so that all of `residuals` follow from it.

    Args:
      program: the forward pass, with calls in place.
      residuals: its variables and literals that the backward pass wants.
      lasting: its inputs that live until the backward pass anyway.
      which: which arrays to encode.
      code_nbytes: gives the bytes of the code of an array of a type. An array whose code would be larger is not encoded.
      keeps_zeros: whether decoded values are zero exactly where the encoded values are.
    """
    origins = Origins(program)
    kept_inputs = {*lasting, *program.constvars}
    parameters = Parameters(program, origins, kept_inputs)
    whole: dict[Any, None] = {}  # ordered sets
    masks: dict[Any, None] = {}
    floats: dict[Any, list[Any]] = {}  # residuals by where they come from
    matched = False
    for var in dict.fromkeys(variables(residuals)):
        matched |= which.matches(origins.uses(origins.path(var)), var.aval)
        if var.aval.size < SMALL:
            whole[var] = None
        elif (sources := _recomputed_from(var, origins, parameters, kept_inputs)) is not None:
            whole.update(dict.fromkeys(sources))
        elif var.aval.dtype in DTYPES:
            floats.setdefault(origins.path(var)[-1], []).append(var)
        elif var.aval.dtype == jnp.bool_:
            masks[var] = None
        else:
            whole[var] = None
    encoded: dict[Any, None] = {}
    refused: list[Any] = []
    encoded_origins: dict[Any, Any] = {}
    for origin, members in floats.items():
        # A single residual is encoded itself, so that the bound is its own; several through where they come from.
        root = origin if len(members) > 1 else origins.path(members[0], exact=True)[-1]
        paths = [origins.path(member) for member in members]
        wanted = root.aval.size >= which.smallest and not is_statistic(root, origins.producer)
        wanted = wanted and which.matches(origins.uses([var for path in paths for var in path]), root.aval)
        if wanted and code_nbytes(root.aval) > nbytes(root.aval):
            wanted = False
            refused.append(root)
        if wanted:
            encoded[root] = None
            encoded_origins |= dict.fromkeys(members, root)
        elif nbytes(root.aval) < sum(nbytes(var.aval) for var in members):
            whole[root] = None
        else:
            whole.update(dict.fromkeys(members))
            continue
        for path in paths:
            whole.update(dict.fromkeys(origins.small_operands(path[: path.index(root) + 1])))
    scales = {root: scale for root in encoded if (scale := scale_of_norm(root, origins)) is not None}
    nonzero = masks_of_nonzero(masks, encoded, origins) if keeps_zeros else {}
    masks = {mask: None for mask in masks if mask not in nonzero}
    return Keep(list(whole), list(encoded), scales, list(masks), nonzero, encoded_origins, matched, refused)


def _recomputed_from(var: Any, origins: Origins, parameters: Parameters, kept_inputs: set[Any]) -> Sequence[Any] | None:
    """The constants, integers, kept inputs and small arrays that `var` follows from; None if it needs anything else."""
    if (source := origins.repeated(var)) is not None:
        return [] if is_literal(source) else [source]
    if var in origins.constants:
        return []
    if (sources := parameters.sources(var)) is not None:
        return sources
    if (sources := integer_sources(var, origins, kept_inputs)) is not None:
        return sources
    path = origins.path(var, to_input=True)
    end = next((i for i, source in enumerate(path) if source in kept_inputs), None)
    return None if end is None else [path[end], *origins.small_operands(path[: end + 1])]
