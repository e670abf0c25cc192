"""What JAX keeps changing, each behind one function. When a release moves or renames something, change this file.

JAX's private modules, which kernels are made with, are imported in two more places, since each import is large and may fail:
`memjax.compress._error_bounded.kernels.kernel_memory` and `memjax._attention.cudnn`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

# Frames of these are not the user's.
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("jax", "flax", "memjax", "optax"))
_TRANSFORM = re.compile(r"\w+\(|\)")


def varying(aval: Any) -> frozenset[str]:
    """Mesh axes over which values of this type differ, inside a `jax.shard_map` that tracks it."""
    return frozenset(aval.manual_axis_type.varying) if aval.manual_axis_type is not None else frozenset()


def varying_like(aval: Any, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """A type of that shape and dtype whose values differ over the same mesh axes."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=aval.manual_axis_type)


def parameters(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation."""
    return eqn.params["_prim"].params if "_prim" in eqn.params else eqn.params


def primitive_name(eqn: Any) -> str:
    """The name of what an equation does. JAX's newer primitives share one name, and have a class each."""
    return type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name


def bodies(eqn: Any) -> list[Any]:
    """The programs inside an equation: of a call, a loop, the branches of a `cond`."""
    # Rules of a custom derivative that nobody asked for (an undifferentiated call) are functions, not jaxprs.
    return [getattr(body, "jaxpr", body) for body in jaxprs_in_params(parameters(eqn))]


def name_stack(eqn: Any) -> str:
    """The named scopes and transformations that an equation was traced in: "jvp(block)/conv"."""
    return str(eqn.source_info.name_stack)


def scope(eqn: Any) -> str:
    """The `jax.named_scope`s around an equation, "block/conv"; Linen modules make one each."""
    return _TRANSFORM.sub("", name_stack(eqn))


def nested(eqn: Any, outer: Any) -> Any:
    """An equation of a call's body, put into the scopes of the call `outer` as well. `outer=None`: the equation as it is."""
    if outer is None:
        return eqn
    both = outer.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=both))


def settings(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """A context with the settings that an equation was traced with."""
    return eqn.ctx.manager


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a program, calls as they are."""
    return jax.core.eval_jaxpr(jaxpr, consts, *inputs)


def without_dead_code(jaxpr: Any) -> Any:
    """The program without equations that no output depends on."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def names_an_axis(effect: Any) -> bool:
    """Whether the effect is that of a collective over a named axis."""
    return type(effect).__name__ == "NamedAxisEffect"


def source_line(eqn: Any) -> str:
    """Where the user's code makes an equation: "model.py:12 (norm)"; empty where that is not known."""
    traceback = eqn.source_info.traceback
    for frame in reversed(traceback.frames if traceback is not None else []):
        if not any(part in frame.file_name for part in _LIBRARIES):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({frame.function_name})"
    return ""


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried.

    Told by shapes, for JAX 0.12 names these numbers otherwise: what is scanned over, or stacked, has an axis more outside.
    """
    (body,) = bodies(eqn)
    same = lambda outer, inner: sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))
    carried = same(eqn.outvars, body.outvars)
    return same(eqn.invars, body.invars) - carried, carried
