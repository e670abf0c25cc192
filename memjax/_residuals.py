"""How many bytes a traced function holds between its forward and its backward pass.

JAX writes the transforms that made an equation into the equation's name stack: `jvp(...)` for the forward
pass of a derivative, `transpose(jvp(...))` for its backward pass, the bodies of `custom_vjp` rules and of
recomputation included. A residual is a value that the forward pass produces and a backward equation reads.
Nothing is compiled or run here.

Bytes are those of one device. Inside `shard_map` and under explicit axes types tell what a device has of an array. Under
automatic axes the compiler decides: there all are taken to be split over as many devices as arguments are. What is not
counted: arguments and constants, which exist anyhow; dead code; a second name for the same bytes (a reshape, a transpose, a no-op
`reduce_precision`), which the compiler does not copy; broadcast constants, which it makes again (the zeros
that `jax.nn.relu` keeps).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from memjax._core.arrays import is_float, is_on_host
from memjax._core.backward.passes import vjp
from memjax._core.compat import (
    bodies,
    derivatives,
    is_backward,
    name_stack,
    primitive_name,
    scan_counts,
    without_dead_code,
)
from memjax._core.lists import pick
from memjax._core.meshes import parts_by
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import nbytes
from memjax._core.program.primitives import ALIASES, CALLS, SOURCES
from memjax._core.program.reasons import reason_of

# One operand in, the same elements out.
_ALIASES = ALIASES | {"transpose", "sharding_constraint", "random_wrap", "random_unwrap"}
_REMAKEABLE = SOURCES | {"convert_element_type"}


@dataclass(eq=False)
class Equation:
    """An equation of the forward pass with what it reads and makes: `Value`s, or `EXISTING` or `REMADE`."""

    eqn: Any
    outer: tuple
    inputs: list
    outputs: list


@dataclass(eq=False)
class Value:
    """One buffer made by the forward pass, with the span of steps over which the backward pass needs it.

    Attributes:
      nbytes: its size on one device.
      devices: the number of devices that it is assumed to be split over under automatic mesh axes.
      on_host: whether it is in host memory.
      made: the step that makes it.
      made_by: the calls and loops around the equation that makes it, outermost first, and then this equation.
      index: which of that equation's outputs it is.
      program: all equations of the forward pass that it belongs to.
      readers: for each read in the backward pass, the reading equation, as in `made_by`, and the index of the operand.
      last_read: the step of the last read.
      why: the reason that a transform gives for keeping it.
    """

    aval: Any
    nbytes: int
    devices: int
    on_host: bool
    made: int
    made_by: tuple
    index: int
    program: list[Equation]
    readers: list[tuple[tuple, int]] = field(default_factory=list)
    last_read: int = -1
    why: str = ""


@dataclass(frozen=True)
class Held:
    """What is held at the moment when it is most for a backward pass that is still to come.

    Attributes:
      nbytes: all bytes together.
      values: each array, and how many of it there are.
    """

    nbytes: int = 0
    values: tuple[tuple[Value, int], ...] = ()


@dataclass(frozen=True)
class Residuals:
    """What is held in device memory, and what in host memory."""

    device: Held
    host: Held


def residuals(closed_jaxpr, devices: int = 1) -> Residuals | None:
    """Residuals of a function that computes gradients; None if there is no backward pass in it.

    Under automatic axes arrays are taken to be split over so many devices.
    """
    jaxpr = closed_jaxpr.jaxpr
    jaxpr = without_dead_code(jaxpr)
    stacks = list(_stacks(jaxpr, ""))
    if not any(map(is_backward, stacks)):
        return None
    # In the forward pass of an outer derivative everything starts with `jvp`, gradients computed on the way
    # (a custom forward rule, the inner part of a second derivative) included. Only forward-over-reverse has
    # no outer transpose.
    outermost = any(derivatives(stack)[:1] == ["transpose"] for stack in stacks)
    return _Walk(outermost, devices).held(jaxpr, "", ())


def iteration(equation: Equation, devices: int = 1) -> tuple[list[Equation], list]:
    """One turn of a scan of the forward pass: its equations, and the body's outputs. A carry is a value of its own."""
    body = bodies(equation.eqn)[0]
    constants, carries = scan_counts(equation.eqn)
    forward, place = _Forward(_Walk(True, devices)), (*equation.outer, equation.eqn)
    operands = list(equation.inputs)
    for index in range(carries):
        operands[constants + index] = forward.value(body.invars[constants + index].aval, -1, place, index)
    return forward.program, forward.visit(body, operands, "", place)


def differentiated(closed_jaxpr, result: Sequence[bool], wrt: Sequence[bool] | None = None):
    """The jaxpr of one forward and one backward pass with respect to the float arguments in `wrt`, or all; None without any.

    Of the outputs those are differentiated that `result` marks and that are floats.
    """
    in_float = [is_float(aval) for aval in closed_jaxpr.in_avals] if wrt is None else list(wrt)
    out_float = [marked and is_float(aval) for aval, marked in zip(closed_jaxpr.out_avals, result, strict=True)]
    if not any(in_float) or not any(out_float):
        return None
    flat_fn = jaxpr_as_fun(closed_jaxpr)

    def forward_backward(args: Sequence, cotangents: Sequence):
        outs, pullback = vjp(lambda every: flat_fn(*every), args, in_float, out_float)
        return outs, pullback(list(cotangents))

    structs = [struct(aval) for aval in closed_jaxpr.in_avals]
    cotangents = [struct(aval) for aval in pick(closed_jaxpr.out_avals, out_float)]
    return jax.make_jaxpr(forward_backward)(structs, cotangents)


def struct(aval) -> jax.ShapeDtypeStruct:
    """The type, for a trace."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _joined(outer: str, eqn) -> str:
    return f"{outer}/{name_stack(eqn)}"


def _stacks(jaxpr, outer: str) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        stack = _joined(outer, eqn)
        yield stack
        for body in bodies(eqn):
            yield from _stacks(body, stack)


def _is_alias(eqn) -> bool:
    if primitive_name(eqn) == "reduce_precision":
        info = jnp.finfo(eqn.invars[0].aval.dtype)
        return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)
    if primitive_name(eqn) == "convert_element_type":
        return eqn.invars[0].aval.dtype == eqn.params["new_dtype"]
    return primitive_name(eqn) in _ALIASES


EXISTING = object()  # an argument or a constant
REMADE = object()  # a broadcast constant


class _Walk:
    """One pass over the equations in program order, calls inlined."""

    def __init__(self, outermost: bool, devices: int):
        self.outermost, self.devices = outermost, devices

    def is_backward(self, stack: str) -> bool:
        return derivatives(stack)[:1] == ["transpose"] if self.outermost else is_backward(stack)

    def held(self, jaxpr, stack: str, outer: tuple) -> Residuals:
        found = _Forward(self)
        found.visit(jaxpr, [EXISTING] * len(jaxpr.invars), stack, outer)
        read = [value for value in found.values if value.last_read >= 0]
        device = {step: held.device for step, held in found.loops.items()}
        host = {step: held.host for step, held in found.loops.items()}
        return Residuals(
            _peak([value for value in read if not value.on_host], device),
            _peak([value for value in read if value.on_host], host),
        )

    def held_in_body(self, eqn, bodies: Sequence, stack: str, outer: tuple) -> Residuals:
        """What a body with a whole forward and backward pass in it holds: one iteration's."""
        found = [self.held(body, stack, outer) for body in bodies]
        most = lambda held: max(held, key=lambda one: one.nbytes)
        return Residuals(most([body.device for body in found]), most([body.host for body in found]))

    def forwarded(self, eqn, bodies: Sequence, inputs: Sequence) -> dict[int, Any]:
        """Outputs of a `shard_map` that are one of its inputs: its residuals include replicated arrays."""
        if primitive_name(eqn) != "shard_map":
            return {}
        source = dict(zip(bodies[0].invars, inputs, strict=True))
        for inner in bodies[0].eqns:
            if _is_alias(inner) and not is_literal(inner.invars[0]) and inner.invars[0] in source:
                source[inner.outvars[0]] = source[inner.invars[0]]
        outvars = enumerate(bodies[0].outvars)
        return {i: source[v] for i, v in outvars if not is_literal(v) and v in source}


class _Forward:
    """The forward pass of one program: its equations, calls inlined, and what they make."""

    def __init__(self, walk: _Walk):
        self.walk = walk
        self.values: list[Value] = []
        self.program: list[Equation] = []
        self.loops: dict[int, Residuals] = {}  # by step: what a loop body or a shard holds while it runs
        self.clock = iter(range(10**12))

    def visit(self, jaxpr, operands: Sequence, stack: str, outer: tuple) -> list:
        """Walk through a jaxpr; its outputs for these operands."""
        known: dict = dict(zip(jaxpr.invars, operands, strict=True))

        def read(atom):
            if is_literal(atom):
                return REMADE
            return known.get(atom, EXISTING)  # what is missing is a constant of the jaxpr

        for eqn in jaxpr.eqns:
            outputs = self.outputs(eqn, [read(atom) for atom in eqn.invars], stack, outer)
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def outputs(self, eqn, inputs: list[Any], stack: str, outer: tuple) -> list:
        step, inner, place = next(self.clock), _joined(stack, eqn), (*outer, eqn)
        name = primitive_name(eqn)
        inside = bodies(eqn)
        if self.walk.is_backward(inner):
            for index, value in enumerate(inputs):
                if isinstance(value, Value):
                    value.last_read = step
                    value.readers.append((place, index))
            return [EXISTING] * len(eqn.outvars)
        if _is_alias(eqn):
            if isinstance(inputs[0], Value) and (why := reason_of(eqn)):
                inputs[0].why = why
            return inputs
        if name in CALLS and len(inside) == 1 and len(inside[0].invars) == len(inputs):
            return self.visit(inside[0], inputs, inner, place)
        if name in _REMAKEABLE and all(value is REMADE for value in inputs):
            return [REMADE] * len(eqn.outvars)
        if any(self.walk.is_backward(below) for body in inside for below in _stacks(body, inner)):
            self.loops[step] = self.walk.held_in_body(eqn, inside, inner, place)
        forwarded = self.walk.forwarded(eqn, inside, inputs)
        made = [self.value(var.aval, step, place, index) for index, var in enumerate(eqn.outvars)]
        outputs = [forwarded.get(index, value) for index, value in enumerate(made)]
        self.program.append(Equation(eqn, outer, inputs, outputs))
        return outputs

    def value(self, aval, step: int, place: tuple, index: int) -> Value:
        made = Value(
            aval,
            _local_bytes(aval, place[-1], index, self.walk.devices),
            self.walk.devices,
            is_on_host(aval),
            step,
            place,
            index,
            self.program,
        )
        self.values.append(made)
        return made


def _local_bytes(aval, eqn, index: int, devices: int) -> int:
    """The bytes that a device has of output `index` of an equation."""
    mesh = aval.sharding.mesh if hasattr(aval, "sharding") else None
    kinds = set() if mesh is None else set(mesh.axis_types)
    if primitive_name(eqn) == "shard_map" and jax.sharding.AxisType.Manual not in kinds:
        return -(-nbytes(aval) // parts_by(eqn.params["mesh"], eqn.params["out_specs"][index]))
    if jax.sharding.AxisType.Explicit in kinds:
        return -(-nbytes(aval) // parts_by(mesh, aval.sharding.spec))
    return nbytes(aval) if jax.sharding.AxisType.Manual in kinds else -(-nbytes(aval) // devices)


def _peak(values: Sequence[Value], loops: dict[int, Held]) -> Held:
    """The largest sum of live values over the steps.

    A program with one backward pass holds all its residuals when that pass begins, so this is their sum; with
    several (micro-batches one after the other) it is what they hold at once.
    """
    change: dict[int, int] = {}
    for value in values:
        change[value.made] = change.get(value.made, 0) + value.nbytes
        change[value.last_read + 1] = change.get(value.last_read + 1, 0) - value.nbytes
    live = peak = at = 0
    for step in sorted(change.keys() | loops.keys()):
        live += change.get(step, 0)
        total = live + loops.get(step, Held()).nbytes
        if total > peak:
            peak, at = total, step
    alive = [(value, 1) for value in values if value.made <= at <= value.last_read]
    return Held(peak, (*alive, *loops.get(at, Held()).values)) if peak else Held()
