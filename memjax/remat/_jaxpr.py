"""Parts of a jaxpr: what `remat` needs to choose what a step keeps and what it recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from memjax._jaxpr import bind, is_literal, read

# Worth keeping rather than recomputing. Everything else is bound by memory traffic and fuses.
_EXPENSIVE = frozenset(
    (
        *("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"),
        *("custom_call", "ffi_call", "pallas_call", "triton_kernel_call", "pure_callback", "io_callback"),
        *(
            "scan",
            "while",
            "cond",
            "fft",
            "sort",
            "cholesky",
            "triangular_solve",
            "lu",
            "qr",
            "svd",
            "eigh",
            "eig",
        ),
        *("random_bits", "threefry2x32", "reduce_window", "reduce_window_sum", "select_and_scatter_add"),
        *(
            "psum",
            "psum_invariant",
            "pmax",
            "pmin",
            "ppermute",
            "all_to_all",
            "psum_scatter",
            "reduce_scatter",
        ),
        *("all_gather", "all_gather_invariant"),
    )
)


def expensive(eqn: Any) -> bool:
    """Whether the equation's outputs are worth keeping: it, or one inside it, does more than touch memory."""
    if eqn.primitive.name in _EXPENSIVE or eqn.effects:
        return True
    return any(expensive(inner) for jaxpr in core.jaxprs_in_params(eqn.params) for inner in jaxpr.eqns)


class Part:
    """The equations of `jaxpr` that lead from `known` variables to `wanted` ones, in order.

    With `effects`, equations with effects (callbacks) run even if nothing wanted depends on them.
    """

    def __init__(self, jaxpr: Any, known: Iterable[Any], wanted: Sequence[Any], *, effects: bool):
        self.known, self.wanted = list(known), list(wanted)
        have = set(self.known)
        needed = {atom for atom in self.wanted if not is_literal(atom)} - have
        self.eqns: list[Any] = []
        for eqn in reversed(jaxpr.eqns):
            if needed.intersection(eqn.outvars) or (effects and eqn.effects):
                self.eqns.append(eqn)
                needed -= set(eqn.outvars)
                needed |= {atom for atom in eqn.invars if not is_literal(atom)} - have
        self.eqns.reverse()
        if needed:
            raise AssertionError(f"not computable from what is known: {needed}")

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        env = dict(zip(self.known, values, strict=True))
        for eqn in self.eqns:
            for var, value in zip(eqn.outvars, bind(eqn, read(env, eqn.invars)), strict=True):
                env.setdefault(var, value)  # a known value is not replaced by its recomputation
        return read(env, self.wanted)
