"""What to do with each value that the backward pass wants: keep it, encode it, or recompute it from others.

What `jax.vjp` saves is redundant. A batch norm saves its input twice, less its mean and times two; a gated feed-forward layer six
arrays that follow from two; a ReLU a mask besides its output, and zeros; a matrix product an input that is kept anyway, cast.
So large residuals are traced back to where they come from:

    an input that is kept       recomputed from it                                              origins.py
    parameters                  recomputed, if only moved or cast; otherwise kept               origins.py
    smaller integers            recomputed, if that is cheap: images, which are data anyway     origins.py
    other images                kept, if the codecs are chosen by `bits`                        costs.py
    constants                   recomputed
    a mask x > 0                from the code of max(x, 0) if that keeps zeros, as the default  origins.py
                                codec of what convolutions read does; or else kept bit by bit
    a ReLU of a norm            recomputed from what the norm reads, decoded, its mask          needs.py
                                kept; but encoded if codecs keep the zeros of all arrays
    outputs of residual blocks  of every few one is encoded; with 8 bits the others are         here
                                recomputed from what the blocks' norms read, masks kept
    floats that must be exact   kept, or recomputed from what is exact: the fewest bytes        needs.py, costs.py
    other floats                recomputed from decoded arrays, those that take the fewest      costs.py
                                bytes, each decoded once
    statistics                  kept: sums of a softmax, deviations of a norm; but recomputed   needs.py
                                if they are of features, and the norm's input is available
    what a loop keeps           kept: in each iteration it has been decided, and encoded        ../differentiable.py
    other dtypes, small arrays  kept
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Sequence, Set
from typing import Any

import jax.numpy as jnp

from memjax._core.backward.minimum_cut import cheapest
from memjax._core.compat import scope
from memjax._core.program.dataflow import is_literal, made_by, read_by
from memjax._core.program.jaxpr import Program, nbytes
from memjax._core.program.primitives import expensive
from memjax.compress._codecs.codec import DTYPES, Exact
from memjax.compress._transform.array_codecs import ArrayCodecs, Role
from memjax.compress._transform.keep.costs import (
    SMALL,
    Candidates,
    Which,
    flops_per_byte,
    recompute_exactly,
    recompute_linear,
    recompute_rounded,
)
from memjax.compress._transform.keep.needs import Need, follows_from_rows, is_rectifier, is_smooth, is_statistic
from memjax.compress._transform.keep.origins import (
    MANY,
    Origins,
    Parameters,
    Scale,
    back_from,
    integer_sources,
    is_kept_by_loop,
    masks_of_nonzero,
    outputs_in_memory,
    scale_of_norm,
)


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
      nonzero: for each mask that is recomputed, the variable in `encoded` that is not zero where the mask is true.
      origins: for each residual that is, or is a multiple of, a variable in `encoded`, that variable.
      computed: those in `encoded` that other residuals are computed from.
      chained: outputs of residual blocks that are recomputed, one from the other.
      matched: whether the user's selection matched any residual, small or large.
      refused: variables that are not encoded because their codes would be larger.
      images: variables that are not encoded because they are images that a convolution reads.
      normalised: variables that statistics are recomputed from.
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
    chained: set[Any]
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
    """What to keep of the forward pass, a program with calls in place, so that all residuals follow from it.

    Args:
      needed: those of its variables that the backward pass wants, and how exactly.
      lasting: its inputs that live until the backward pass anyway.
      known_parameters: those of them that are parameters.
    """
    origins = Origins(program)
    kept_inputs = {*lasting, *program.constvars}
    floats = [var for var in program.constvars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
    parameters = Parameters(program, origins, kept_inputs, {*known_parameters, *floats} if known_parameters else set())
    whole, masks, exact, rounded = _sorted(needed, origins, parameters, kept_inputs, keeps_fine=codecs.keeps_fine)
    candidates = Candidates(origins, parameters, which, codecs, needed, rounded)
    there = {*kept_inputs, *origins.constants, *whole, *masks}
    encoded, kept = _cut(program, exact, rounded, there, candidates, codecs)
    chained = _chained(encoded, {*there, *kept}, candidates, program) if codecs.keeps_chains else set()
    if chained:
        encoded, kept = _cut(program, exact, rounded, there, candidates, codecs, chained)
    for var in kept:
        (masks if var.aval.dtype == jnp.bool_ else whole)[var] = None
    roles = [candidates.role(var) for var in encoded]
    telling = [var for var, role in zip(encoded, roles, strict=True) if codecs.keeps_zeros_of(role)]
    nonzero = masks_of_nonzero(masks, telling, origins)
    masks = {mask: None for mask in masks if mask not in nonzero}
    given = {*encoded, *whole, *masks, *nonzero}
    inputs = _sources([*exact, *rounded], program, given) & kept_inputs
    whole.update(dict.fromkeys(var for var in (*program.constvars, *lasting) if var in inputs))
    arrays = {*encoded, *(var for var in whole if not is_statistic(var, origins.producer))}
    available = arrays | _between([*exact, *rounded], program, given)
    recomputed_statistics = [
        var for var in whole if var not in available and follows_from_rows(var, available, origins)
    ]
    for var in recomputed_statistics:
        del whole[var]
    given.difference_update(recomputed_statistics)
    ends = {var: next((end for end in origins.path(var) if end in encoded), None) for var in rounded}
    return Keep(
        whole=list(whole),
        encoded=encoded,
        roles=roles,
        scales={root: scale for root in encoded if (scale := scale_of_norm(root, origins)) is not None},
        masks=list(masks),
        outputs=outputs_in_memory(masks, origins),
        nonzero=nonzero,
        origins={var: end for var, end in ends.items() if end is not None},
        chained=chained.difference(encoded, whole),
        computed=_sources([var for var, end in ends.items() if end is None], program, given) & set(encoded),
        matched=any(which.matches(origins.uses(origins.path(var)), var.aval) for var in needed),
        refused=list(candidates.refused),
        images=list(candidates.images),
        normalised=set(_sources(recomputed_statistics, program, given)),
    )


def _cut(
    program: Program,
    exact: list[Any],
    rounded: list[Any],
    available: set[Any],
    candidates: Candidates,
    codecs: ArrayCodecs,
    chained: Set[Any] = frozenset(),
) -> tuple[list[Any], list[Any]]:
    """The fewest bytes from which `exact` and `rounded` follow: arrays to encode, in the order of the program, and to keep as
    they are or as bits. Those in `chained` may be recomputed, too.
    """
    origins = candidates.origins
    price = 0.0 if codecs.reads_gradients else flops_per_byte(program, codecs.bits(rounded))
    kept = cheapest(exact, origins.producer, available, candidates.whole_bytes, recompute_exactly(price))
    available = available | {*kept}
    available |= _between(exact, program, available)
    recompute = (
        recompute_linear(origins)
        if codecs.reads_gradients
        else recompute_rounded(program, origins, available, price, chained)
    )
    # Codes of ReLUs that keep zeros tell the masks, which would be kept beside.
    again = (lambda eqn: None if is_rectifier(eqn) else recompute(eqn)) if codecs.keeps_zeros else recompute

    def cost(var: Any) -> int:
        if not (price and candidates.is_encoded(var)):
            return candidates.kept_bytes(var)
        return candidates.kept_bytes(var) + int(codecs.flops_of_coding * nbytes(var.aval) / price)

    encoded: dict[Any, None] = {}
    for var in cheapest(rounded, origins.producer, available, cost, again):
        # A copy in another shape or a wider dtype is not encoded, but what it is copied from.
        source = origins.path(var, exact=True)[-1]
        if candidates.is_encoded(var) and source not in available:
            encoded[source] = None
        else:
            kept.append(var)
    return sorted(encoded, key=lambda var: program.flow.place.get(var, -1)), kept


_LONGEST = 3  # outputs that are computed at once: with more, steps took longer
_SUMS = ("add", "sub", "add_any")  # their derivatives read no operand


def _chained(encoded: Sequence[Any], available: Set[Any], candidates: Candidates, program: Program) -> set[Any]:
    """The outputs of residual blocks that are not encoded after all, but recomputed.

    They follow from what the last norms of their blocks read, and from the outputs before them. All that is decoded anyway. Their
    masks are kept in place of their codes. The backward pass computes a chain of outputs at once where it needs the last one,
    and keeps each until it gets there. So a chain is only so long that its outputs take no more memory than the codes that are
    not needed any more by then.
    """
    origins, place, chains = candidates.origins, program.flow.place, dict[Any, set[Any]]()
    is_output = lambda var: candidates.role(var).by_channel and candidates.role(var).is_rectified
    codes = [(place.get(var, -1), candidates.kept_bytes(var)) for var in encoded if not is_output(var)]

    def bytes_after(var):
        """The bytes of later codes: those of what is computed after the last equation whose derivative reads `var`."""
        reading = [eqn for eqn in origins.consumers.get(var, []) if eqn.primitive.name not in _SUMS]
        last = max((place.get(out, 0) for eqn in reading for out in eqn.outvars), default=place[var])
        return sum(size for at, size in codes if at >= last)

    for var in filter(is_output, encoded):
        if (sources := _of_block(var, {*available, *encoded}, origins)) is not None:
            before = {earlier for source in sources if source in chains for earlier in (source, *chains[source])}
            if len(before) < _LONGEST and sum(nbytes(earlier.aval) for earlier in before) <= bytes_after(var):
                chains[var] = before
    return set(chains)


def _of_block(out: Any, given: Set[Any], origins: Origins) -> list[Any] | None:
    """The arrays of `given` that `out`, the output of a ReLU, is a sum of, or of what is scaled and shifted; None for others."""
    few = lambda var: var.aval.size * MANY <= out.aval.size
    passed = lambda var, eqn: var is out or not (var in given or few(var) or expensive(eqn))
    walked = [(var, eqn) for var, eqn in back_from([out], origins.producer, passed) if not few(var)]
    rectifiers = [eqn for _, eqn in walked if eqn is not None and is_rectifier(eqn)]
    others = [eqn for _, eqn in walked if eqn is not None and not is_rectifier(eqn)]
    sources = [var for var, eqn in walked if eqn is None]
    follows = (
        len(rectifiers) == 1 and all(var in given for var in sources) and all(is_smooth(eqn, origins) for eqn in others)
    )
    return sources if follows else None


def _sorted(
    needed: dict[Any, Need], origins: Origins, parameters: Parameters, kept_inputs: set[Any], *, keeps_fine: bool
) -> tuple[dict[Any, None], dict[Any, None], list[Any], list[Any]]:
    """What is kept whole, as ordered sets this and the masks, and of the other floats those that must be exact, and the rest."""
    whole: dict[Any, None] = {}
    masks: dict[Any, None] = {}
    exact: list[Any] = []
    rounded: list[Any] = []
    least_exact = Need.FINE if keeps_fine else Need.EXACT
    for var, need in needed.items():
        if var.aval.size < SMALL or is_kept_by_loop(var, origins.producer):
            whole[var] = None
        elif (sources := _recomputed_from(var, origins, parameters, kept_inputs)) is not None:
            whole.update(dict.fromkeys(sources))
        elif var.aval.dtype in DTYPES and not is_statistic(var, origins.producer):
            (exact if need >= least_exact else rounded).append(var)
        else:
            (masks if var.aval.dtype == jnp.bool_ else whole)[var] = None
    return whole, masks, exact, rounded


def _between(wanted: Iterable[Any], program: Program, given: set[Any]) -> KeysView[Any]:
    """What is computed on the way from `given` to `wanted`: the product that gives queries and keys may give values, too."""
    return made_by(program.flow.needed(wanted, given)).keys()


def _sources(wanted: Sequence[Any], program: Program, given: set[Any]) -> KeysView[Any]:
    """Those of `given`, and inputs, that `wanted` is computed from."""
    read = [*wanted, *read_by(program.flow.needed(wanted, given))]
    return dict.fromkeys(var for var in read if var in given or var not in program.flow.place).keys()


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


MASK = "1 bit per value: a mask"
NOTHING = (
    "memjax.compressed encodes nothing of a function: what may be rounded is small, its code is no smaller, or it is computed "
    "again in less time than its code takes"
)
_NEEDS = {
    Need.EXACT: "it has to agree with other values: an exponential, a divisor, a root or a kernel reads it",
    Need.FINE: "one product with it is subtracted from another, and little may remain",
}
_MOST = 4  # sources that are named


def why_whole(var: Any, keep: Keep, needed: dict[Any, Need], which: Which, producer: dict[Any, Any]) -> str:
    """Why an array is kept as it is."""
    if var.aval.dtype == jnp.bool_:
        return "exact: a small mask"
    if var.aval.dtype not in DTYPES:
        return f"exact: {var.aval.dtype} is not encoded"
    if var.aval.size < max(which.smallest, SMALL):
        return "exact: small"
    if is_statistic(var, producer):
        return "exact: a statistic that many values depend on"
    if (need := needed.get(var, Need.COARSE)) in _NEEDS:
        return f"exact: {_NEEDS[need]}"
    if var in keep.images:
        return "exact: an image; to encode it takes long and saves little"
    if var in keep.refused:
        return "exact: its code would be larger"
    if var not in needed:
        return "exact: what has to be exact is computed again from it"
    return "exact: computed from parameters, or not selected by `where`"


def why_encoded(codec: Any, *, is_source: bool) -> str:
    """Why an array is encoded, or kept as it is beside encoded ones."""
    if isinstance(codec, Exact):
        return "exact: in fewer bits gradients would be off by more than they may be"
    also = ", and what is computed again from it" if is_source else ""
    bits = f"{codec.bits} bits, " if hasattr(codec, "bits") else ""
    return f"{bits}{type(codec).__name__}: the backward pass bears its rounding{also}"


def not_kept(residuals: Iterable[Any], keep: Keep, inputs: set[Any], program: Program) -> Iterator[str]:
    """What of `residuals` `jax.vjp` would keep and this does not, and from what it is recomputed. `inputs` are there anyway."""
    given = {*keep.whole, *keep.encoded, *keep.masks, *keep.nonzero, *inputs}
    producer = program.flow.makers
    found: Counter[str] = Counter()
    for var in residuals:
        if var in given or var.aval.size < SMALL:
            continue
        large = [source for source in _sources([var], program, given) if source.aval.size >= SMALL]
        names = [_name(source, producer) + (", decoded" if source in keep.encoded else "") for source in large]
        rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        found[f"{_name(var, producer)}: from {'; '.join(names[:_MOST]) or 'constants and small arrays'}{rest}"] += 1
    yield from (f"{text} (x{count})" if count > 1 else text for text, count in found.items())


def _name(var: Any, producer: dict[Any, Any]) -> str:
    eqn = producer.get(var)
    where = "an input" if eqn is None else "/".join(filter(None, (scope(eqn), eqn.primitive.name)))
    return f"{var.aval.str_short()} of {where}"
