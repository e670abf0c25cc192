"""Loops of a compressed function: what an iteration keeps is encoded in it.

Encoded after the loop, the arrays of all iterations would be there at once, stacked, and be decoded at once before the backward
loop. So the body of a scan is compressed by itself, as if the user had done so, and what it keeps is stacked. Of what it reads,

    slices of what lasts until the backward pass, as the layers' weights    are kept anyway, and never encoded
    other slices, and what is carried                                      may be encoded in each iteration
    what is the same in all iterations                                     is left to the program around: one code is enough

A loop in whose iterations nothing is encoded, because arrays are small, is left as it is: its stacks may be large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from memjax._core.arrays import is_float
from memjax._core.compat import scan_counts, scope
from memjax._core.lists import Arrays
from memjax._core.program.dataflow import is_literal, variables
from memjax._core.program.jaxpr import Program, as_closed, axis_sizes, producers
from memjax.compress._transform.array_codecs import ArrayCodecs
from memjax.compress._transform.keep.costs import Which
from memjax.compress._transform.keep.origins import Inputs, Origins, Parameters, body_of


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is known of a program that is differentiated through codecs, beside the program.

    Attributes:
      names: of its inputs.
      axes: sizes of the named axes that its collectives run over.
      in_loop: whether it is the body of a loop: what it keeps is then marked as decided, for the program around.
    """

    inputs: Inputs
    codecs: ArrayCodecs
    which: Which
    names: Sequence[str]
    axes: dict[str, int]
    in_loop: bool = False


class Loops:
    """The loops of a program that encode in each iteration.

    Args:
      wanted: inputs of the program that are differentiated.
      compress: `Differentiable`, which makes a function of a body, given its `Setting`.
    """

    def __init__(self, program: Program, wanted: Sequence[bool], setting: Setting, compress: Callable[..., Any]):
        self._bodies: dict[int, Any] = {}  # by equation
        self.derivatives: list[Any] = []
        scans = [eqn for eqn in program.eqns if eqn.primitive.name == "scan"]
        if not scans or not setting.codecs.in_iterations:
            return
        of_program = _OfProgram(program, setting.inputs, wanted)
        for eqn in scans:
            of_body, of_derivative = of_program.operands(eqn)
            if any(of_derivative):
                closed, which = as_closed(eqn.params["jaxpr"]), setting.which.within(scope(eqn))
                names = [""] * len(of_derivative)
                body = compress(closed, Setting(of_body, setting.codecs, which, names, axis_sizes(closed), True))
                derivative = body.derivative([var.aval for var in closed.jaxpr.invars], of_derivative)
                if derivative.encodes:
                    self._bodies[id(eqn)] = body
                    self.derivatives.append(derivative)

    def __bool__(self) -> bool:
        return bool(self._bodies)

    def __contains__(self, eqn: Any) -> bool:
        return id(eqn) in self._bodies

    def run(self, eqn: Any, values: Arrays, settings: Arrays) -> Arrays:
        """The outputs of a loop that is one of these, the codecs having these settings."""
        body = self._bodies[id(eqn)].with_settings(settings)
        consts, carried = scan_counts(eqn)

        def iteration(carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
            outs = body([*values[:consts], *carry, *xs])
            return outs[:carried], outs[carried:]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(iteration, values[consts : consts + carried], values[consts + carried :], **options)
        return [*carry, *ys]


class _OfProgram:
    """What is known of the operands of a program's loops."""

    def __init__(self, program: Program, inputs: Inputs, wanted: Sequence[bool]):
        self._origins = Origins(program)
        lasting = {var for var, lasts in zip(program.invars, inputs.lasting, strict=True) if lasts}
        parameters = {var for var, is_one in zip(program.invars, inputs.parameters, strict=True) if is_one}
        self._parameters = Parameters(program, self._origins, {*lasting, *program.constvars}, parameters)
        self._of_derivative = {var for var, flag in zip(program.invars, wanted, strict=True) if flag}
        for eqn in program.eqns:
            if not self._of_derivative.isdisjoint(variables(eqn.invars)):
                self._of_derivative.update(eqn.outvars)

    def operands(self, eqn: Any) -> tuple[Inputs, list[bool]]:
        """The inputs of a loop's body, and those of them that are differentiated."""
        consts, carried = scan_counts(eqn)
        places = range(len(eqn.invars))
        is_carried = [consts <= i < consts + carried for i in places]
        parameters, constants = self._parameters, self._origins.constants
        lasts = lambda atom: is_literal(atom) or atom in constants or parameters.sources(atom) is not None
        is_parameter = lambda atom: not is_literal(atom) and parameters.is_parameter(atom)
        inputs = Inputs(
            [i < consts or (not is_carried[i] and lasts(eqn.invars[i])) for i in places],
            [not is_carried[i] and is_parameter(eqn.invars[i]) for i in places],
        )
        is_wanted = lambda i: is_carried[i] or (not is_literal(eqn.invars[i]) and eqn.invars[i] in self._of_derivative)
        of_derivative = not self._of_derivative.isdisjoint(variables(eqn.invars))
        wanted = [of_derivative and is_float(eqn.invars[i].aval) and is_wanted(i) for i in places]
        return inputs, wanted


# Marks what an iteration keeps, so that the program around the loop leaves the stacks as they are.
_NAME = "memjax, kept by an iteration of a loop"


def kept_by_loop(kept: Any) -> Any:
    """The arrays of a pytree, marked."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _NAME), kept)


def is_kept_by_loop(var: Any, producer: dict[Any, Any]) -> bool:
    """Whether `var` has such a mark: it is made, or stacked, of what has one."""
    while (eqn := producer.get(var)) is not None:
        if eqn.primitive.name == "name":
            if eqn.params["name"] == _NAME:
                return True
            [var] = eqn.invars  # another name for it
        elif (body := body_of(eqn)) is not None:
            var, producer = body.outvars[eqn.outvars.index(var)], producers(body)
        else:
            return False
        if is_literal(var):
            return False
    return False
