"""What the arrays in optax's states are: with signs, or never negative and divided by. It decides how they are encoded.

By the place in the state, not by values: all are zero at first, and a momentum may be positive for long, too. What is in no
state of this table, or is not named, stays exact. Exact on purpose:

- weights and averages of them (schedule-free's `z`, lookahead's slow weights): errors of a code are large beside their changes;
- a maximum over steps (`nu_max`), which keeps what was rounded up;
- first and second moments whose difference is taken (`scale_by_stddev`): it could become negative;
- sums over all steps that weights are computed from (MADGRAD, COCOB, Prodigy's `s`).
"""

from collections.abc import Callable
from typing import Any

import jax

SIGNED, SQUARE = "signed", "square"

ROLES: dict[str, dict[str, str]] = {
    "ScaleByAdamState": {"mu": SIGNED, "nu": SQUARE},
    "ScaleByAmsgradState": {"mu": SIGNED, "nu": SQUARE},
    "ScaleByBeliefState": {"mu": SIGNED, "nu": SQUARE},
    "ScaleByLionState": {"mu": SIGNED},
    "ScaleByRmsState": {"nu": SQUARE},
    "ScaleByRmsWithCountState": {"nu": SQUARE},
    "ScaleByRStdDevState": {},
    "ScaleByRStdDevWithCountState": {},
    "ScaleByRssState": {"sum_of_squares": SQUARE},
    "ScaleByAdaDeltaState": {"e_g": SQUARE, "e_x": SQUARE},
    "ScaleByAdanState": {"m": SIGNED, "v": SIGNED, "n": SQUARE, "g": SIGNED},
    "ScaleByNovogradState": {"mu": SIGNED},
    "ScaleBySM3State": {"nu": SIGNED},
    "ScaleByOptimisticGradientState": {"previous_gradient": SIGNED},
    "TraceState": {"trace": SIGNED},
    "EmaState": {"ema": SIGNED},
    "ApplyEvery": {"grad_acc": SIGNED},
    "MultiStepsState": {"acc_grads": SIGNED},
    "FactoredState": {"v": SQUARE},
    "MuonState": {"mu": SIGNED},
    "MomoState": {"exp_avg": SIGNED},
    "MomoAdamState": {"exp_avg": SIGNED, "exp_avg_sq": SQUARE},
    "ProdigyState": {"exp_avg": SIGNED, "exp_avg_sq": SQUARE},
    "DAdaptAdamWState": {"exp_avg": SIGNED, "exp_avg_sq": SQUARE},
    "LookaheadState": {},
    "ScheduleFreeState": {},
    "MadgradState": {},
    "COCOBState": {},
    "SplitMasterState": {},
    "StochasticRoundState": {},
    "CodedState": {},
}


def known_class(node: Any) -> bool:
    return type(node).__name__ in ROLES and hasattr(node, "_fields")


def map_roles(f: Callable[[str, str, Any], Any], state: Any) -> Any:
    """The state with `f(role, path, array)` in place of each array that has a role."""

    def in_tree(above: Any, tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, node: in_node((*above, *path), node), tree, is_leaf=known_class
        )

    def in_node(path: Any, node: Any) -> Any:
        if not known_class(node):
            return node
        roles, fields = ROLES[type(node).__name__], {}
        for name, value in zip(node._fields, node, strict=True):
            below = (*path, jax.tree_util.GetAttrKey(name))
            fields[name] = of_role(roles[name], below, value) if name in roles else in_tree(below, value)
        return node._replace(**fields)

    def of_role(role: str, above: Any, tree: Any) -> Any:
        name = lambda path: jax.tree_util.keystr((*above, *path), simple=True, separator="/")
        return jax.tree_util.tree_map_with_path(lambda path, x: f(role, name(path), x), tree)

    return in_tree((), state)
