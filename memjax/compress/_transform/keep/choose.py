"""What to do with each value that the backward pass wants: keep it, encode it, or compute it again from others.

What `jax.vjp` saves is redundant. A batch norm saves its input twice, less its mean and times two; a gated feed-forward layer six
arrays that follow from two; a ReLU a mask besides its output, and zeros; a matrix product an input that is there anyway, cast.
So large residuals are traced back to where they come from:

    an input that is kept       computed again from it                                          origins.py
    parameters                  computed again, if only moved or cast; otherwise kept           parameters.py
    smaller integers            computed again, if that is cheap: images, which are data anyway integers.py
    other images                kept, if the codecs are chosen by `bits`                        cut/candidates.py
    constants                   computed again
    a mask x > 0                from the code of max(x, 0) if that keeps zeros, as the default  masks.py
                                codec of what convolutions read does; or else kept bit by bit
    a ReLU of a norm            computed again from what the norm reads, decoded, its mask      cut/smooth.py
                                kept; but encoded if codecs keep the zeros of all arrays
    floats that must be exact   kept, or computed again from what is exact: the fewest bytes    cut/
    other floats                computed again from decoded arrays, those that take the fewest  cut/
                                bytes, each decoded once
    statistics                  kept: sums of a softmax, deviations of a norm; but computed     statistic.py
                                again if they are of features, and the norm's input is there
    what a loop keeps           kept: in each turn it has been decided, and encoded             ../loops.py
    other dtypes, small arrays  kept

Floats must be exact that have to agree with others, such as queries and keys with a log-sum-exp: see cut/needs.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from memjax._core.backward.minimum_cut import cheapest
from memjax._core.program.jaxpr import Program, Walk, is_literal, nbytes
from memjax.compress._codecs.codec import DTYPES
from memjax.compress._transform.array_codecs import ArrayCodecs, Role
from memjax.compress._transform.keep.cut.again import Again, again_exactly, again_linear, again_rounded, flops_per_byte
from memjax.compress._transform.keep.cut.candidates import Candidates
from memjax.compress._transform.keep.cut.needs import Need
from memjax.compress._transform.keep.cut.smooth import is_rectifier
from memjax.compress._transform.keep.deviations import Scale, scale_of_norm
from memjax.compress._transform.keep.integers import integer_sources
from memjax.compress._transform.keep.kept_by_loop import is_kept_by_loop
from memjax.compress._transform.keep.masks import masks_of_nonzero, outputs_in_memory
from memjax.compress._transform.keep.origins import Origins
from memjax.compress._transform.keep.parameters import Parameters
from memjax.compress._transform.keep.statistic import follows_from_rows, is_statistic
from memjax.compress._transform.keep.which import SMALL, Which


@dataclasses.dataclass(frozen=True)
class Keep:
    """Variables of a program, by what is kept of them.

    Attributes:
      whole: kept as they are.
      encoded: kept as codes.
      roles: for each of these, what the choice of its codec depends on.
      scales: the deviations of the channels of those variables in `encoded` that a batch norm reads.
      masks: kept as bits.
      outputs: for each of these that is the sign of a ReLU's output which a product reads, that output.
      nonzero: for each mask that is computed again, the variable in `encoded` that is not zero where the mask is true.
      origins: for each residual that is, or is a multiple of, a variable in `encoded`, that variable.
      computed: those in `encoded` that other residuals are computed from.
      matched: whether the user's selection matched any residual, small or large.
      refused: variables that are not encoded because their codes would be larger.
      images: variables that are not encoded because they are images that a convolution reads.
      normalised: variables that statistics are computed again from.
    """

    whole: list[Any]
    encoded: list[Any]
    roles: list[Role]
    scales: dict[Any, Scale]
    masks: list[Any]
    outputs: dict[Any, Any]
    nonzero: dict[Any, Any]
    origins: dict[Any, Any]
    computed: set[Any]
    matched: bool
    refused: list[Any]
    images: list[Any]
    normalised: set[Any]


def choose(
    program: Program,
    needed: dict[Any, Need],
    lasting: Sequence[Any],
    known_parameters: Sequence[Any],
    which: Which,
    codecs: ArrayCodecs,
) -> Keep:
    """What to keep, so that all residuals follow from it.

    Args:
      program: the forward pass, with calls in place.
      needed: those of its variables that the backward pass wants, and how exactly.
      lasting: its inputs that live until the backward pass anyway.
      known_parameters: those of them that are parameters.
      which: which arrays to encode.
      codecs: what they are encoded with.
    """
    origins = Origins(program)
    kept_inputs = {*lasting, *program.constvars}
    floats = [var for var in program.constvars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
    parameters = Parameters(program, origins, kept_inputs, {*known_parameters, *floats} if known_parameters else set())
    whole: dict[Any, None] = {}  # ordered sets
    masks: dict[Any, None] = {}
    exact: list[Any] = []
    rounded: list[Any] = []
    matched = False
    least_exact = Need.FINE if codecs.keeps_fine else Need.EXACT
    for var, need in needed.items():
        matched |= which.matches(origins.uses(origins.path(var)), var.aval)
        if var.aval.size < SMALL or is_kept_by_loop(var, origins.producer):
            whole[var] = None
        elif (sources := _recomputed_from(var, origins, parameters, kept_inputs)) is not None:
            whole.update(dict.fromkeys(sources))
        elif var.aval.dtype in DTYPES and is_statistic(var, origins.producer):
            whole[var] = None
        elif var.aval.dtype in DTYPES:
            (exact if need >= least_exact else rounded).append(var)
        elif var.aval.dtype == jnp.bool_:
            masks[var] = None
        else:
            whole[var] = None

    candidates = Candidates(origins, parameters, which, codecs, needed, rounded)
    price = 0.0 if codecs.reads_gradients else flops_per_byte(program, codecs.bits(rounded))
    free = {*kept_inputs, *origins.constants, *whole, *masks}
    kept = cheapest(exact, origins.producer, free, candidates.whole_bytes, again_exactly(price))
    free.update(kept)
    free.update(_between(exact, origins, free))
    again = again_linear(origins) if codecs.reads_gradients else again_rounded(program, origins, free, price)
    if codecs.keeps_zeros:
        again = _except_relus(again)

    def cost(var: Any) -> int:
        if not (price and candidates.is_encoded(var)):
            return candidates.kept_bytes(var)
        return candidates.kept_bytes(var) + int(codecs.flops_of_coding * nbytes(var.aval) / price)

    encoded: dict[Any, None] = {}
    for var in cheapest(rounded, origins.producer, free, cost, again):
        # A copy in another shape or a wider dtype is not encoded, but what it is copied from.
        source = origins.path(var, exact=True)[-1]
        if candidates.is_encoded(var) and source not in free:
            encoded[source] = None
        else:
            kept.append(var)
    for var in kept:
        (masks if var.aval.dtype == jnp.bool_ else whole)[var] = None
    encoded = dict.fromkeys(sorted(encoded, key=origins.place))
    scales = {root: scale for root in encoded if (scale := scale_of_norm(root, origins)) is not None}
    roles = [candidates.role(var) for var in encoded]
    telling = [var for var, role in zip(encoded, roles, strict=True) if codecs.keeps_zeros_of(role)]
    nonzero = masks_of_nonzero(masks, telling, origins)
    masks = {mask: None for mask in masks if mask not in nonzero}
    given = {*encoded, *whole, *masks, *nonzero}
    inputs = _sources([*exact, *rounded], origins, given) & kept_inputs
    whole.update(dict.fromkeys(var for var in (*program.constvars, *lasting) if var in inputs))
    arrays = {*encoded, *(var for var in whole if not is_statistic(var, origins.producer))}
    there = arrays | _between([*exact, *rounded], origins, given)
    again_statistics = [var for var in whole if var not in there and follows_from_rows(var, there, origins.producer)]
    for var in again_statistics:
        del whole[var]
    given.difference_update(again_statistics)
    ends = {var: next((end for end in origins.path(var) if end in encoded), None) for var in rounded}
    return Keep(
        whole=list(whole),
        encoded=list(encoded),
        roles=roles,
        scales=scales,
        masks=list(masks),
        outputs=outputs_in_memory(masks, origins),
        nonzero=nonzero,
        origins={var: end for var, end in ends.items() if end is not None},
        computed=_sources([var for var, end in ends.items() if end is None], origins, given) & encoded.keys(),
        matched=matched,
        refused=list(candidates.refused),
        images=list(candidates.images),
        normalised=_sources(again_statistics, origins, given),
    )


def _except_relus(again: Again) -> Again:
    """The same, but ReLUs are not computed again: their codes tell the masks, which would be kept beside."""
    return lambda eqn: None if is_rectifier(eqn) else again(eqn)


def _between(wanted: Iterable[Any], origins: Origins, given: set[Any]) -> set[Any]:
    """What is computed on the way from `given` to `wanted`: the product that gives queries and keys may give values, too."""
    walk, found = Walk(wanted), set[Any]()
    for var in walk:
        if var not in given and (eqn := origins.producer.get(var)) is not None:
            found.update(eqn.outvars)
            walk.add(eqn.invars)
    return found


def _sources(wanted: Iterable[Any], origins: Origins, given: set[Any]) -> set[Any]:
    """Those of `given`, and inputs, that `wanted` is computed from."""
    walk, found = Walk(wanted), set[Any]()
    for var in walk:
        if var in given or var not in origins.producer:
            found.add(var)
        else:
            walk.add(origins.producer[var].invars)
    return found


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
