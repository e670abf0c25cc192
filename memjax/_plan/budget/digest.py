"""What tells programs apart."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from memjax._core.program.jaxpr import is_literal
from memjax._plan.derivative import Derivative

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def digest(derivative: Derivative) -> str:
    """Equal for equal programs, however their variables are called."""
    number: dict[Any, int] = {}
    parts: list[str] = [str(derivative.wrt), str(derivative.outs), *(["blocks"] if derivative.of_blocks else [])]
    for program in (derivative.forward, derivative.backward):
        for eqn in program.eqns:
            parts.append(f"{eqn.primitive.name} {_ADDRESS.sub('', str(eqn.params))}")
            for atom in (*eqn.invars, *eqn.outvars):
                name = f"literal {atom.val}" if is_literal(atom) else str(number.setdefault(atom, len(number)))
                parts.append(f"{name}:{atom.aval.str_short()}")
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
