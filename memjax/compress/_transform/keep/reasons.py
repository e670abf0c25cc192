"""Why each array is kept as it is, kept in few bits, or not kept at all, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from memjax._core.compat import scope
from memjax._core.program.jaxpr import Walk
from memjax.compress._codecs.codec import DTYPES, Exact
from memjax.compress._transform.keep.choose import Keep
from memjax.compress._transform.keep.cut.needs import Need
from memjax.compress._transform.keep.statistic import is_statistic
from memjax.compress._transform.keep.which import SMALL, Which

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


def not_kept(residuals: list[Any], keep: Keep, there: set[Any], producer: dict[Any, Any]) -> Iterator[str]:
    """What `jax.vjp` would keep and this does not, and from what it is computed again.

    Args:
      residuals: what `jax.vjp` would keep.
      keep: what is kept.
      there: inputs, which are in memory anyway.
      producer: the equation that makes each variable.
    """
    given = {*keep.whole, *keep.encoded, *keep.masks, *keep.nonzero, *there}
    found: Counter[str] = Counter()
    for var in dict.fromkeys(residuals):
        if var in given or var.aval.size < SMALL:
            continue
        walk, sources = Walk([var]), dict[Any, None]()
        for source in walk:
            if source in given or source not in producer:
                sources[source] = None
            else:
                walk.add(producer[source].invars)
        large = [source for source in sources if source.aval.size >= SMALL]
        names = [_name(source, producer) + (", decoded" if source in keep.encoded else "") for source in large]
        rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        found[f"{_name(var, producer)}: from {'; '.join(names[:_MOST]) or 'constants and small arrays'}{rest}"] += 1
    yield from (f"{text} (x{count})" if count > 1 else text for text, count in found.items())


def _name(var: Any, producer: dict[Any, Any]) -> str:
    eqn = producer.get(var)
    where = "an input" if eqn is None else "/".join(filter(None, (scope(eqn), eqn.primitive.name)))
    return f"{var.aval.str_short()} of {where}"
