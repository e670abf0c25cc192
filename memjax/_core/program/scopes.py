"""The module path of an equation, or of an instruction of a compiled program: "Model/layers_3/mlp".

Linen modules and `jax.named_scope` write paths into name stacks, among the names of transforms and of what JAX itself
makes of calls and loops. Those are left out. Where a stack has no scope, the path is that of the user's functions which
made the equation, by its traceback: "layer/attention"; a method `__call__` is named by its class.
"""

from __future__ import annotations

import dis
import functools
import itertools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from memjax._core.compat import Frame, call_site, frames, name_stack, primitive_name
from memjax._core.program.primitives import PLAIN_CALLS

# jit(silu), transpose(jvp(Model)): the first is no scope, the last has one.
_JIT = re.compile(r"\bp?jit\([^()]*\)")
_TRANSFORM = re.compile(r"\w+\(|\)")
_BRANCH = re.compile(r"branch_\d+_fun$")
_MACHINERY = frozenset(
    (
        "closed_call",
        "eval_jaxpr",
        "rematted_computation",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
        "shard_map",
    )
)
_LOOPS = frozenset(("body", "cond"))
_LOCALS = "<locals>."


def scopes(stack: str) -> tuple[str, ...]:
    """The scopes in a name stack, "transpose(jvp(Model))/while/body/mlp" for example."""
    parts = [part for part in _TRANSFORM.sub("", _JIT.sub("", stack)).split("/") if part]
    found: list[str] = []
    for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        of_loop = part == "while" or (before == "while" and part in _LOOPS)
        of_branch = _BRANCH.match(part) or (part == "cond" and _BRANCH.match(after))
        # Linen's lifted transforms have scopes of their own, "Cell_0.scan_fn/Cell_0", and so has jnp.einsum, "ij,jk->ik".
        lifted = "<" in part or part.partition(".")[0] == after != part
        if not (of_loop or of_branch or lifted or part in _MACHINERY or "->" in part):
            found.append(part)
    return tuple(found)


def function_in(f: Any) -> Any:
    """The function in what wraps it: `functools.partial`, `jax.jit`, decorators. A bound method or an object stays as it is."""
    while isinstance(f, functools.partial) or hasattr(f, "__wrapped__"):
        f = f.func if isinstance(f, functools.partial) else f.__wrapped__
    return f


def function_name(f: Any) -> str:
    """What messages call it: the function in it by its name, an object that is called by its class."""
    inner = function_in(f)
    return getattr(inner, "__name__", type(inner).__name__)


class Paths:
    """Paths in the programs of one function.

    Args:
      f: the function; its own frame, and what calls it, are in no path.
    """

    def __init__(self, f: Any):
        code = getattr(function_in(f), "__code__", None)
        self._root = None if code is None else (code.co_filename, code.co_qualname)
        self.name = function_name(f)
        self._callers = _running()
        self._known: dict[tuple, tuple[Sequence[Any], str]] = {}

    def of(self, eqns: Sequence[Any]) -> str:
        """The path of the last of `eqns`; those before are the calls and loops around it, the outermost first."""
        key = tuple(map(id, eqns))
        if key not in self._known:  # which keeps the equations, so that their ids stay theirs
            stack = "/".join(name_stack(eqn) for eqn in eqns)
            lines = [frame for eqn in eqns for frame in frames(eqn)]
            self._known[key] = eqns, self.joined(scopes(stack), lines)
        return self._known[key][1]

    def has_scopes(self, eqns: Sequence[Any]) -> bool:
        """Whether the path is one of scopes."""
        return bool(scopes("/".join(name_stack(eqn) for eqn in eqns)))

    def joined(self, found: Sequence[str], lines: Sequence[Frame]) -> str:
        """The path of scopes; without any, of the functions of `lines`: of the function itself, its name. Empty without both."""
        return "/".join(_without_repeats(found) or self._functions(lines)) or (self.name if lines else "")

    def _functions(self, lines: Sequence[Frame]) -> list[str]:
        own = [index for index, frame in enumerate(lines) if (frame.file, frame.function) == self._root]
        names = [_function(frame.function) for frame in (lines[own[-1] + 1 :] if own else self.inside(lines))]
        return _without_repeats([name for name in names if name])

    def inside(self, lines: Sequence[Frame]) -> Sequence[Frame]:
        """The lines without those of what calls the function."""
        places = ((frame.file, frame.function) for frame in lines)
        return lines[sum(1 for _ in itertools.takewhile(self._callers.__contains__, places)) :]


def line_of(eqns: Sequence[Any]) -> str:
    """The innermost line of the user's that makes the last of `eqns`: "model.py:12"."""
    for eqn in reversed(eqns):
        for frame in reversed(frames(eqn)):
            return f"{os.path.basename(frame.file)}:{frame.line}"
    return ""


def place_of(eqn: Any) -> str:
    """Where the user's code makes an equation: "Model/layers_3/mlp, model.py:12"; without scopes "model.py:12 (norm)".

    Empty where that is not known.
    """
    return place(name_stack(eqn), frames(eqn))


def place(stack: str, lines: Sequence[Frame]) -> str:
    """The same of a name stack and the user's lines, the outermost first."""
    path = "/".join(_without_repeats(scopes(stack)))
    line = f"{os.path.basename(lines[-1].file)}:{lines[-1].line}" if lines else ""
    if path or not lines:
        return ", ".join(part for part in (path, line) if part)
    return f"{line} ({lines[-1].function})"


def maker_of(eqn: Any) -> str:
    """What makes a value, and where in the user's code: "mul model.py:12 (norm)". Of a call its name."""
    name = primitive_name(eqn)
    return f"{eqn.params['name'] if name in PLAIN_CALLS and 'name' in eqn.params else name} {place_of(eqn)}".strip()


def runs_in_loop(eqns: Sequence[Any], function: str) -> bool:
    """Whether the code that makes an equation is in a loop of Python in the function of that name in its path."""
    return any(
        jump.opname.startswith("JUMP_BACKWARD") and jump.argval <= position <= jump.offset
        for eqn in eqns
        for code, position in call_site(eqn)
        if _function(code.co_qualname) == function
        for jump in dis.get_instructions(code)
    )


def _running() -> set[tuple[str, str]]:
    """Files and names of the functions that run now."""
    found, frame = set(), sys._getframe(1)
    while frame is not None:
        found.add((frame.f_code.co_filename, frame.f_code.co_qualname))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _function(name: str) -> str:
    """What a function is called in a path; nothing for a lambda, a comprehension or the code of a module."""
    name = name.rpartition(_LOCALS)[2]
    if "<" in name:
        return ""
    return name.removesuffix(".__call__")


def _without_repeats(parts: Sequence[str]) -> list[str]:
    """A trace within a trace repeats what is around it: a, b, a, b, c is a, b, c."""
    kept: list[str] = []
    for part in parts:
        kept.append(part)
        for size in range(len(kept) // 2, 0, -1):
            if kept[-size:] == kept[-2 * size : -size]:
                del kept[-size:]
                break
    return kept
