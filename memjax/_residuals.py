"""How many bytes a traced function holds between its forward and its backward pass.

JAX writes the transforms that made an equation into the equation's name stack: `jvp(...)` for the forward
pass of a derivative, `transpose(jvp(...))` for its backward pass, the bodies of `custom_vjp` rules and of
recomputation included. A residual is a value that the forward pass produces and a backward equation reads.
Nothing is compiled or run here.

Bytes are those of whole arrays (all shards together). What is not counted: arguments and constants, which
exist anyhow; dead code; a second name for the same bytes (a reshape, a transpose, a no-op
`reduce_precision`), which the compiler does not copy; broadcast constants, which it makes again (the zeros
that `jax.nn.relu` keeps).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun

from memjax._core.arrays import is_float
from memjax._core.compat import bodies, name_stack, primitive_name, without_dead_code
from memjax._core.jaxpr import nbytes
from memjax._core.lists import drop, merge, pick
from memjax._core.primitives import ALIASES, CALLS, SOURCES

_TRANSFORM = re.compile(r"\b(jvp|transpose)\(")
# One operand in, the same elements out.
_ALIASES = ALIASES | {"transpose", "sharding_constraint", "random_wrap", "random_unwrap"}
_REMAKEABLE = SOURCES | {"convert_element_type"}


@dataclass(frozen=True)
class ResidualBytes:
    """Largest number of bytes held at one moment for a backward pass that is still to come."""

    device: int
    host: int


@dataclass(eq=False)
class _Value:
    """One buffer made by the forward pass, with the span of steps over which the backward pass needs it."""

    nbytes: int
    on_host: bool
    made: int
    last_read: int = -1


def residual_bytes(closed_jaxpr) -> ResidualBytes | None:
    """Residuals of a function that computes gradients; None if there is no backward pass in it."""
    jaxpr = closed_jaxpr.jaxpr
    jaxpr = without_dead_code(jaxpr)
    passes = [_passes(stack) for stack in _stacks(jaxpr, "")]
    if not any("transpose" in transforms for transforms in passes):
        return None
    # In the forward pass of an outer derivative everything starts with `jvp`, gradients computed on the way
    # (a custom forward rule, the inner part of a second derivative) included. Only forward-over-reverse has
    # no outer transpose.
    outermost = any(transforms[:1] == ["transpose"] for transforms in passes)
    return _Walk(outermost).bytes_of(jaxpr, "")


def differentiated(closed_jaxpr, result: Sequence[bool]):
    """The jaxpr of one forward and one backward pass with respect to all float arguments; None without any.

    Of the outputs those are differentiated that `result` marks and that are floats.
    """
    in_float = [is_float(aval) for aval in closed_jaxpr.in_avals]
    out_float = [marked and is_float(aval) for aval, marked in zip(closed_jaxpr.out_avals, result, strict=True)]
    if not any(in_float) or not any(out_float):
        return None
    flat_fn = jaxpr_as_fun(closed_jaxpr)

    def forward_backward(args: Sequence, cotangents: Sequence):
        def of_floats(floats):
            outs = flat_fn(*merge(floats, drop(args, in_float), in_float))
            return pick(outs, out_float), drop(outs, out_float)

        outs, pullback, aux = jax.vjp(of_floats, pick(args, in_float), has_aux=True)
        return outs, aux, pullback(list(cotangents))

    structs = [_struct(aval) for aval in closed_jaxpr.in_avals]
    cotangents = [_struct(aval) for aval in pick(closed_jaxpr.out_avals, out_float)]
    return jax.make_jaxpr(forward_backward)(structs, cotangents)


def _struct(aval) -> jax.ShapeDtypeStruct:
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _passes(stack: str) -> list[str]:
    """The `jvp` and `transpose` of a name stack, outermost first. A transpose alone is no backward pass."""
    return _TRANSFORM.findall(stack) if "jvp(" in stack else []


def _joined(outer: str, eqn) -> str:
    return f"{outer}/{name_stack(eqn)}"


def _stacks(jaxpr, outer: str) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        stack = _joined(outer, eqn)
        yield stack
        for body in bodies(eqn):
            yield from _stacks(body, stack)


def _on_host(aval) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _is_alias(eqn) -> bool:
    if primitive_name(eqn) == "reduce_precision":
        info = jnp.finfo(eqn.invars[0].aval.dtype)
        return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)
    if primitive_name(eqn) == "convert_element_type":
        return eqn.invars[0].aval.dtype == eqn.params["new_dtype"]
    return primitive_name(eqn) in _ALIASES


_EXISTING = object()  # an argument or a constant
_REMADE = object()  # a broadcast constant


class _Walk:
    """One pass over the equations in program order, calls inlined."""

    def __init__(self, outermost: bool):
        self.outermost = outermost

    def is_backward(self, stack: str) -> bool:
        transforms = _passes(stack)
        return transforms[:1] == ["transpose"] if self.outermost else "transpose" in transforms

    def has_backward(self, jaxpr, stack: str) -> bool:
        return any(self.is_backward(inner) for inner in _stacks(jaxpr, stack))

    def bytes_of(self, jaxpr, stack: str) -> ResidualBytes:
        values: list[_Value] = []
        loops: dict[int, ResidualBytes] = {}  # by step: what a loop body or a shard holds while it runs
        clock = iter(range(10**12))

        def visit(jaxpr, operands: Sequence, stack: str) -> list:
            known: dict = dict(zip(jaxpr.invars, operands, strict=True))

            def read(atom):
                if isinstance(atom, Literal):
                    return _REMADE
                return known.get(atom, _EXISTING)  # what is missing is a constant of the jaxpr

            for eqn in jaxpr.eqns:
                step, inner = next(clock), _joined(stack, eqn)
                inputs: list[Any] = [read(atom) for atom in eqn.invars]
                name = primitive_name(eqn)
                inside = bodies(eqn)
                if self.is_backward(inner):
                    for value in inputs:
                        if isinstance(value, _Value):
                            value.last_read = step
                    outputs = [_EXISTING] * len(eqn.outvars)
                elif _is_alias(eqn):
                    outputs = inputs
                elif name in CALLS and len(inside) == 1 and len(inside[0].invars) == len(inputs):
                    outputs = visit(inside[0], inputs, inner)
                elif name in _REMAKEABLE and all(value is _REMADE for value in inputs):
                    outputs = [_REMADE] * len(eqn.outvars)
                else:
                    if any(self.has_backward(body, inner) for body in inside):
                        loops[step] = self.body_bytes(eqn, inner)
                    forwarded = self.forwarded(eqn, inputs)
                    made = {var: _Value(nbytes(var.aval), _on_host(var.aval), step) for var in eqn.outvars}
                    values.extend(made.values())
                    outputs = [forwarded.get(index, made[var]) for index, var in enumerate(eqn.outvars)]
                known.update(zip(eqn.outvars, outputs, strict=True))
            return [read(atom) for atom in jaxpr.outvars]

        visit(jaxpr, [_EXISTING] * len(jaxpr.invars), stack)
        return _peak([value for value in values if value.last_read >= 0], loops)

    def body_bytes(self, eqn, stack: str) -> ResidualBytes:
        """What a body with a whole forward and backward pass in it holds: one iteration's, every shard's."""
        held = [self.bytes_of(body, stack) for body in bodies(eqn)]
        shards = 1
        if primitive_name(eqn) == "shard_map":
            sizes = eqn.params["mesh"].shape
            shards = math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
        return ResidualBytes(shards * max(body.device for body in held), shards * max(body.host for body in held))

    def forwarded(self, eqn, inputs: Sequence) -> dict[int, Any]:
        """Outputs of a `shard_map` that are one of its inputs: its residuals include replicated arrays."""
        if primitive_name(eqn) != "shard_map":
            return {}
        (body,) = bodies(eqn)
        source = dict(zip(body.invars, inputs, strict=True))
        for inner in body.eqns:
            if _is_alias(inner) and not isinstance(inner.invars[0], Literal) and inner.invars[0] in source:
                source[inner.outvars[0]] = source[inner.invars[0]]
        outvars = enumerate(body.outvars)
        return {i: source[v] for i, v in outvars if not isinstance(v, Literal) and v in source}


def _peak(values: Sequence[_Value], loops: dict[int, ResidualBytes]) -> ResidualBytes:
    """The largest sum of live values over the steps, device and host each by itself.

    A program with one backward pass holds all its residuals when that pass begins, so this is their sum; with
    several (micro-batches one after the other) it is what they hold at once.
    """
    peaks = []
    for on_host in (False, True):
        change: dict[int, int] = {}
        for value in values:
            if value.on_host == on_host:
                change[value.made] = change.get(value.made, 0) + value.nbytes
                change[value.last_read + 1] = change.get(value.last_read + 1, 0) - value.nbytes
        live = peak = 0
        for step in sorted(change.keys() | loops.keys()):
            live += change.get(step, 0)
            body = loops.get(step, ResidualBytes(0, 0))
            peak = max(peak, live + (body.host if on_host else body.device))
        peaks.append(peak)
    return ResidualBytes(*peaks)
