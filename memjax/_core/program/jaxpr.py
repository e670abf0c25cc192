"""Evaluates jaxprs equation by equation, with calls in place, so that equations and kept values can be seen and replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from memjax._core.arrays import anywhere, is_on_host, vary
from memjax._core.compat import eval_jaxpr, lines, nested, parameters, primitive_name, scope, settings
from memjax._core.program.dataflow import Dataflow, is_literal, read_by, renamed
from memjax._core.program.primitives import CHECKPOINTS, CUSTOM_CALLS, PLAIN_CALLS, REPLICATIONS


def nbytes(aval: Any) -> int:
    """The bytes of an array of this type; 0 for other types. Integers of 2 and 4 bits are packed; PRNG keys are included."""
    return -(-math.prod(aval.shape) * _bits(aval.dtype) // 8) if hasattr(aval, "dtype") else 0


@functools.lru_cache(256)
def _bits(dtype: Any) -> int:
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * dtype.itemsize


def as_closed(jaxpr: Any) -> Any:
    """The body of an equation as a closed jaxpr, which some of JAX's versions have already."""
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


@contextlib.contextmanager
def inside(eqn: Any, *, marked: bool = False) -> Iterator[None]:
    """Enters an equation's scope and settings: equations traced inside get its source lines; if `marked`, also its derivative
    marks."""
    if marked:
        with settings(eqn), lines(eqn, marked=True):
            yield
        return
    name = scope(eqn)
    with settings(eqn), lines(eqn), jax.named_scope(name) if name else contextlib.nullcontext():
        yield


def bind(eqn: Any, values: Sequence[Any], *, marked: bool = False) -> list[Any]:
    """Runs the equation on these inputs, in its scope (see `inside`); returns its outputs."""
    params = eqn.primitive.get_bind_params(eqn.params)
    if eqn.primitive.name in REPLICATIONS:
        # A value substituted for a constant may already vary over some of these axes; `vary` adds only the missing ones, where
        # `pcast` would fail.
        return [vary(value, frozenset(params["axes"])) for value in values]
    with inside(eqn, marked=marked):
        out = eqn.primitive.bind(*values, **params)
    outs = list(out) if eqn.primitive.multiple_results else [out]
    return outs if (after := _after.get()) is None else after(eqn.outvars, outs)


_SLICES = "dynamic_slice", "dynamic_update_slice"
After = Callable[[Sequence[Any], list[Any]], list[Any]]
"""From the results of an equation, as variables and values, to values in their place."""
_after: ContextVar[After | None] = ContextVar("memjax_after_equations", default=None)


@contextlib.contextmanager
def after_equations(do: After) -> Iterator[None]:
    """Has `do` called with what each equation makes."""
    token = _after.set(do)
    try:
        yield
    finally:
        _after.reset(token)


def axis_sizes(jaxpr: Any) -> dict[str, int]:
    """Sizes of the named axes that the collectives of a program run over. Call it where these names are known."""
    names = {effect.name for effect in jaxpr.effects if hasattr(effect, "name")}
    return {name: jax.lax.axis_size(name) for name in sorted(names, key=str)}


def trace(f: Callable[..., Any], types: Sequence[Any], axes: dict[str, int]) -> Any:
    """The jaxpr of `f` for arguments of these types, whose automatic meshes are ignored.

    `axes` are named axes of a surrounding `jax.vmap` or `jax.shard_map`, with their sizes. A custom derivative rule may run
    where JAX no longer knows them.
    """
    known = [(name, size) for name, size in axes.items() if not _is_known(name)]
    return jax.make_jaxpr(f, axis_env=known)(*jax.tree.map(anywhere, list(types)))


def call_of(f: Callable[..., Any], operands: Sequence[Any], of: Any, axes: Mapping[str, int], **options: Any) -> Any:
    """An equation that calls `f` with options, at the place in the user's code of an equation that it stands for.

    Compilers fuse what is in a call as anything else; models of time and memory have its operands and results written.
    """
    run = functools.wraps(f)(functools.partial(f, **options))
    [call] = trace(jax.jit(run), [atom.aval for atom in operands], dict(axes)).jaxpr.eqns
    return of.replace(
        primitive=call.primitive,
        params=call.params,
        effects=call.effects,
        invars=list(operands),
        outvars=[core.Var(out.aval) for out in call.outvars],
    )


def result_types(f: Callable[..., Any], *args: Any) -> Any:
    """The types of f's results for arguments, or for types of arguments. Those of `jax.eval_shape` say less of meshes."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)


def with_axes(f: Callable[..., Any], axes: dict[str, int]) -> Callable[..., Any]:
    """`f`, where its loops may run collectives over the named axes `axes` in a rule where their names are not known.

    Then it is traced with them, and the equations are handed to the transformation around, which knows its axis.
    """

    def run(*args: Any) -> Any:
        if all(map(_is_known, axes)):
            return f(*args)
        leaves, tree = jax.tree.flatten(args)
        of_leaves = lambda *leaves: f(*jax.tree.unflatten(tree, leaves))
        unknown = [(name, size) for name, size in axes.items() if not _is_known(name)]
        closed, shapes = jax.make_jaxpr(of_leaves, axis_env=unknown, return_shape=True)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), eval_jaxpr(closed.jaxpr, closed.consts, leaves))

    return run


def _is_known(axis_name: str) -> bool:
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    *,
    differentiable: bool,
) -> list[Any]:
    """Evaluates a jaxpr, with the bodies of calls in place; returns its outputs.

    Args:
      jaxpr: of `consts` and `inputs`.
      consts, inputs: values.
      differentiable: keep calls with a derivative rule of their own as they are.
    """
    program = calls_in_place(core.ClosedJaxpr(jaxpr, list(consts)), differentiable=differentiable)
    env = program.given(inputs)
    evaluate_in(program.eqns, env)
    return read(env, program.outvars)


def counts_of_host(loop: Any) -> list[int]:
    """Positions, among the operands of a scan, of the numbers of slices of arrays on the host that its turns read or write."""
    body = as_closed(loop.params["jaxpr"]).jaxpr
    slices = [eqn for eqn in body.eqns if eqn.primitive.name in _SLICES and is_on_host(eqn.invars[0].aval)]
    numbers = {var for var in read_by(slices) if not var.aval.shape}
    return [i for i, var in enumerate(body.invars) if var in numbers]


def evaluate_in(eqns: Iterable[Any], env: dict[Any, Any]) -> None:
    """Runs equations and adds their outputs to `env`. A value that is already in it is not replaced by a recomputed one."""
    for eqn in eqns:
        for var, value in zip(eqn.outvars, bind(eqn, read(env, eqn.invars)), strict=True):
            env.setdefault(var, value)


def read(env: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    """The values of variables and literals."""
    return [atom.val if is_literal(atom) else env[atom] for atom in atoms]


@dataclasses.dataclass(frozen=True)
class Program:
    """The equations of a jaxpr, with the values of its constants. They stay as they are."""

    constvars: list[Any]
    consts: list[Any]
    invars: list[Any]
    outvars: list[Any]
    eqns: list[Any]

    @functools.cached_property
    def flow(self) -> Dataflow:
        """The data dependences between the equations of the program."""
        return Dataflow(self.eqns)

    def given(self, inputs: Iterable[Any]) -> dict[Any, Any]:
        """The values of constants and inputs, by variable."""
        return dict(zip([*self.constvars, *self.invars], [*self.consts, *inputs], strict=True))

    def with_inputs(self, consts: int) -> Program:
        """The program whose first `consts` constants are its first inputs."""
        inputs = [*self.constvars[:consts], *self.invars]
        return dataclasses.replace(self, constvars=self.constvars[consts:], consts=self.consts[consts:], invars=inputs)

    def between(self, reads: Sequence[Any], makes: Sequence[Any], **changes: Any) -> Program:
        """The program from these variables to those, in place of its own, with changes to fields of each equation."""
        names = dict(zip(self.invars, reads, strict=True)) | dict(zip(self.outvars, makes, strict=True))
        eqns = [
            eqn.replace(invars=renamed(eqn.invars, names), outvars=renamed(eqn.outvars, names), **changes)
            for eqn in self.eqns
        ]
        return Program(self.constvars, self.consts, [*reads], [*makes], eqns)


def without_dead_equations(program: Program) -> Program:
    """The program without equations that no output depends on."""
    eqns = program.flow.needed(program.outvars, always=program.flow.acting)
    return Program(program.constvars, program.consts, program.invars, program.outvars, eqns)


def instead(program: Program, names: dict[Any, Any]) -> Program:
    """The program that reads other variables, or literals, in place of some of its inputs, which it has no more."""
    eqns = [eqn.replace(invars=renamed(eqn.invars, names)) for eqn in program.eqns]
    inputs = [var for var in program.invars if var not in names]
    return Program(program.constvars, program.consts, inputs, renamed(program.outvars, names), eqns)


def does_nothing(eqn: Any) -> bool:
    """Whether the result is the operand. JAX adds such equations to have types agree in their mesh."""
    name, params = primitive_name(eqn), parameters(eqn)
    if name not in ("reshard", "reshape") or params.get("dimensions") is not None:
        return False
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    return before.shape == after.shape and anywhere(before) == anywhere(after)


def calls_in_place(closed: Any, *, differentiable: bool, checkpoints: bool = False) -> Program:
    """The program of a closed jaxpr with the bodies of its calls in their place. Nothing is traced: variables are renamed.

    Equations that do nothing are left out.

    Args:
      closed: the jaxpr.
      differentiable: keep calls with a derivative rule of their own as they are.
      checkpoints: put the bodies of checkpoints in their place, too.
    """
    calls = PLAIN_CALLS if differentiable else PLAIN_CALLS | CUSTOM_CALLS
    if checkpoints:
        calls = calls | dict.fromkeys(CHECKPOINTS, "jaxpr")
    program = Program([*closed.jaxpr.constvars], [*closed.consts], [*closed.jaxpr.invars], [], [])

    def add(jaxpr: Any, names: dict[Any, Any], outer: Any) -> list[Any]:
        """Add the equations of `jaxpr`, which is the body of `outer`, and give its outputs."""
        renamed = lambda atoms: [atom if is_literal(atom) else names[atom] for atom in atoms]
        for eqn in jaxpr.eqns:
            placed, name = nested(eqn, outer), primitive_name(eqn)
            body = parameters(eqn).get(calls[name]) if name in calls else None
            if name in CHECKPOINTS and isinstance(body, core.Jaxpr):
                body = core.ClosedJaxpr(body, ())
            if does_nothing(eqn):
                outs = renamed(eqn.invars)
            elif isinstance(body, core.ClosedJaxpr):
                constvars = [core.Var(var.aval) for var in body.jaxpr.constvars]
                program.constvars.extend(constvars)
                program.consts.extend(body.consts)
                inner = zip(
                    [*body.jaxpr.constvars, *body.jaxpr.invars], [*constvars, *renamed(eqn.invars)], strict=True
                )
                outs = add(body.jaxpr, dict(inner), placed)
            else:
                # A body may be there several times, with variables of its own each time.
                outs = list(eqn.outvars) if outer is None else [core.Var(var.aval) for var in eqn.outvars]
                program.eqns.append(placed.replace(invars=renamed(eqn.invars), outvars=outs))
            names.update(zip(eqn.outvars, outs, strict=True))
        return renamed(jaxpr.outvars)

    inputs = [*program.constvars, *program.invars]
    program.outvars.extend(add(closed.jaxpr, dict(zip(inputs, inputs, strict=True)), None))
    return program


def same_program(one: Program, other: Program) -> bool:
    """Whether two programs have no constants and the same equations."""
    if one.consts or other.consts or len(one.eqns) != len(other.eqns):
        return False
    names: dict[Any, Any] = {}

    def same(atoms: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(atoms) == len(others) and all(
            b.aval == a.aval and a.val == b.val if is_literal(a) and is_literal(b) else names.get(id(b)) is a
            for a, b in zip(atoms, others, strict=True)
        )

    def define(outs: Sequence[Any], others: Sequence[Any]) -> bool:
        names.update({id(b): a for a, b in zip(outs, others, strict=False)})
        return [a.aval for a in outs] == [b.aval for b in others]

    return (
        define(one.invars, other.invars)
        and all(
            a.primitive is b.primitive
            and a.params == b.params
            and same(a.invars, b.invars)
            and define(a.outvars, b.outvars)
            for a, b in zip(one.eqns, other.eqns, strict=True)
        )
        and same(one.outvars, other.outvars)
    )
