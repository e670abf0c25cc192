"""Loop fission: a loop over time whose turns do only what one has to wait for.

What of a turn does not follow from what the loop carries runs for all turns at once, before the loop: the products of inputs
and weights of a recurrent layer. What nothing that is carried follows from does so after it: what is stacked for the backward
pass, and in the loop of the backward pass the products that make gradients of inputs and of weights. Sums over turns are sums
over one more dimension, in one product. A loop of a recurrent layer is left with one product a turn.

All of that is in memory for every turn of the loop, so only loops over a chunk of the steps are divided. And only GPUs gain: a
turn there takes about as long as its kernels take to start, and a divided turn has fewer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memjax._core.arrays import is_float
from memjax._core.compat import scan_counts, scope, varying
from memjax._core.lists import Arrays
from memjax._core.program.costs import GPUS, array_bytes
from memjax._core.program.dataflow import Dataflow, is_literal, made_by, read_by, variables
from memjax._core.program.jaxpr import Program, as_closed, bind, calls_in_place, evaluate_in, inside, read, trace
from memjax._core.program.primitives import ALIASES, ELEMENTWISE, MOVES, REDUCTIONS, VIEWS, expensive

TURNS = "memjax_turns"
"""The scope of loops over the steps of a chunk, in which plans look for loops to divide."""
_PRODUCT = "dot_general"
# What may run for all turns at once. Slices at places that turns compute would be gathers.
_TOGETHER = (ELEMENTWISE | VIEWS | ALIASES | MOVES | REDUCTIONS | {_PRODUCT}) - {"gather", "dynamic_slice"}
_LINEAR_VIEWS = "transpose", "convert_element_type"
_ADDITIONS = "add", "add_any"


def with_fission(program: Program, axes: Mapping[str, int], platform: str) -> Program:
    """The program with each loop over the steps of a chunk divided, in the bodies of loops as well; itself if it has none.

    Args:
      program: a pass of a derivative.
      axes: sizes of the named axes around it.
      platform: of the device, as JAX calls it.
    """
    eqns = []
    for eqn in program.eqns:
        if eqn.primitive.name != "scan":
            eqns.append(eqn)
        elif TURNS in scope(eqn):
            parts = divided(eqn, platform)
            eqns += [eqn] if parts is None else _equations(parts, eqn, axes)
        else:
            eqns.append(_with_body(eqn, axes, platform))
    if len(eqns) == len(program.eqns) and all(map(operator.is_, eqns, program.eqns)):
        return program
    return Program(program.constvars, program.consts, program.invars, program.outvars, eqns)


def _with_body(eqn: Any, axes: Mapping[str, int], platform: str) -> Any:
    """The loop with its body as `with_fission` makes it."""
    closed = as_closed(eqn.params["jaxpr"])
    body = calls_in_place(closed, differentiable=False)
    changed = with_fission(body, axes, platform)
    if changed is body:
        return eqn
    jaxpr = closed.jaxpr.replace(
        constvars=changed.constvars, invars=changed.invars, outvars=changed.outvars, eqns=changed.eqns
    )
    return eqn.replace(params={**eqn.params, "jaxpr": type(closed)(jaxpr, changed.consts)})


def _equations(run: Callable[[Arrays], Arrays], eqn: Any, axes: Mapping[str, int]) -> list[Any]:
    """Equations that make what a loop makes; the loop itself if that needs arrays of its own."""
    places = {var: i for i, var in enumerate(dict.fromkeys(variables(eqn.invars)))}

    def of_variables(*values: Any) -> Arrays:
        with inside(eqn):
            outs = run([atom.val if is_literal(atom) else values[places[atom]] for atom in eqn.invars])
            return [
                jnp.copy(out) if any(out is one for one in (*values, *outs[:i])) else out for i, out in enumerate(outs)
            ]

    program = calls_in_place(trace(of_variables, [var.aval for var in places], dict(axes)), differentiable=False)
    made = set(made_by(program.eqns)).intersection(variables(program.outvars))
    if program.consts or len(made) < len(eqn.outvars):
        return [eqn]
    return program.between([*places], eqn.outvars).eqns


class _Sum(NamedTuple):
    """A state that is a sum: nothing reads it before the last turn.

    Attributes:
      of: what is stacked over all turns. It is what a turn adds. Where that is a product, these are its two operands.
      product: the equation of that product. None: a turn adds something else.
      views: transpositions of its result, the last one first.
    """

    of: list[Any]
    product: Any | None = None
    views: Sequence[Any] = ()


class _Parts(NamedTuple):
    """A body divided.

    Attributes:
      before: equations that run for all turns at once, before the loop.
      core: equations of the loop.
      after: those that run for all turns at once, after it.
      hoisted: variables that `before` makes and others read.
      stacked: variables that `core` makes, or gets, and `after` reads or the loop stacks.
      sums: by number of a state.
    """

    before: list[Any]
    core: list[Any]
    after: list[Any]
    hoisted: list[Any]
    stacked: list[Any]
    sums: dict[int, _Sum]


def may_be_divided(eqn: Any, platform: str) -> bool:
    """Whether a scan, or that of its derivative, may be left with fewer products a turn on a platform."""
    body = as_closed(eqn.params["jaxpr"]).jaxpr
    return platform in GPUS and _is_recurrent(body.eqns, body.invars[: scan_counts(eqn)[0]])


def _is_recurrent(eqns: Sequence[Any], weights: Sequence[Any]) -> bool:
    """Whether there is a product with weights that all turns share. Loops without are bound by memory: those over layers, which
    have weights of their own, or those whose states are larger than what goes into a turn."""
    shared = set(weights)
    for eqn in eqns:
        reads = [atom in shared for atom in eqn.invars if not is_literal(atom)]
        if eqn.primitive.name == _PRODUCT and any(reads):
            return True
        if eqn.primitive.name in VIEWS and all(reads):
            shared.update(eqn.outvars)
    return False


def divided(eqn: Any, platform: str) -> Callable[[Arrays], Arrays] | None:
    """A function from a loop's operands to its results, which runs it divided. None if that gains nothing, as for loops that are
    left without a product.

    Args:
      eqn: the scan. It may be run for another number of turns.
      platform: of the device, as JAX calls it.
    """
    if eqn.effects or platform not in GPUS:
        return None
    body = calls_in_place(as_closed(eqn.params["jaxpr"]), differentiable=False)
    # Within a `jax.shard_map` stacks would have to be told the axes over which they vary.
    if body.consts or any(one.effects or any(varying(out.aval) for out in one.outvars) for one in body.eqns):
        return None
    parts = _divide(body, *scan_counts(eqn))
    return None if parts is None else _Divided(eqn, body, parts)


def _divide(body: Program, consts: int, carried: int) -> _Parts | None:
    """The parts of a body. What is stacked for `after` is what products of the loop make, and its states: to stack more would
    start more kernels than to run elementwise operations once more, for all turns at once."""
    flow, ys = body.flow, variables(body.outvars[carried:])
    states, rows = body.invars[consts : consts + carried], body.invars[consts + carried :]
    found = {j: _sum_at(body, j, states, rows) for j in range(carried)}
    sums = {j: one for j, one in found.items() if one is not None}
    carried_on = variables(out for j, out in enumerate(body.outvars[:carried]) if j not in sums)
    is_free = lambda eqn: set(states).isdisjoint(read_by(flow.needed(eqn.outvars)))
    free = [eqn for eqn in flow.needed(carried_on) if eqn.primitive.name == _PRODUCT and is_free(eqn)]
    made_before = [eqn.outvars[0] for eqn in free]
    before, core = flow.needed(made_before), flow.needed(carried_on, set(made_before))
    of_core = made_by(core)
    kept = made_by(eqn for eqn in core if expensive(eqn))
    wanted = [*ys, *(var for one in sums.values() for var in one.of)]
    after = flow.needed(wanted, {*made_before, *kept, *carried_on, *body.invars})
    if any(eqn.primitive.name not in _TOGETHER for eqn in (*before, *after)):
        return None
    reads = {*read_by(after), *wanted} - made_by(after).keys()
    stacked = [var for var in (*of_core, *states) if var in reads]
    is_product = lambda eqn: eqn is not None and eqn.primitive.name == _PRODUCT
    moves_products = any(map(is_product, (*before, *after, *(one.product for one in sums.values()))))
    if not _is_recurrent(core, body.invars[:consts]) or not (moves_products or len(stacked) < len(ys)):
        return None
    hoisted = [var for var in made_before if var in reads or var in read_by(core)]
    return _Parts(before, core, after, hoisted, stacked, sums)


def _sum_at(body: Program, j: int, states: Sequence[Any], rows: Sequence[Any]) -> _Sum | None:
    """The sum that state `j` is, if what turns add need not be there for all of them, or is small."""
    state, out = states[j], body.outvars[j]
    flow = body.flow
    maker = None if is_literal(out) else flow.makers.get(out)
    if maker is None or maker.primitive.name not in _ADDITIONS:
        return None
    others = [atom for atom in maker.invars if atom is not state and not is_literal(atom)]
    results = variables(body.outvars)
    is_alone = len(flow.readers.get(state, ())) == 1 and not flow.readers.get(out)
    if not is_alone or len(others) != 1 or state in results or results.count(out) > 1:
        return None
    [added] = others
    turns = {*states, *rows}
    changes = lambda atom: not is_literal(atom) and not turns.isdisjoint([atom, *read_by(flow.needed([atom]))])
    views, product = list[Any](), flow.makers.get(added)
    while product is not None and product.primitive.name in _LINEAR_VIEWS:
        views += [product] if product.primitive.name == "transpose" else []
        product = None if is_literal(product.invars[0]) else flow.makers.get(product.invars[0])
    if product is None or product.primitive.name != _PRODUCT:
        is_small = array_bytes(added) <= max(map(array_bytes, rows), default=0)
        return _Sum([added]) if is_small and changes(added) else None
    if not is_float(product.outvars[0].aval) or not all(map(changes, product.invars)):
        return None
    return _Sum(list(product.invars), product, views)


class _Divided:
    """Runs a loop divided, for any number of turns."""

    def __init__(self, eqn: Any, body: Program, parts: _Parts):
        self._eqn, self._body, self._parts = eqn, body, parts
        self._consts, self._carried = scan_counts(eqn)
        self._states = body.invars[self._consts : self._consts + self._carried]
        self._on = [j for j in range(self._carried) if j not in parts.sums]  # what the loop itself carries

    def __call__(self, values: Arrays) -> Arrays:
        body, parts, first = self._body, self._parts, self._consts + self._carried
        env = dict(zip(body.invars, values, strict=True))
        fixed = {var: env[var] for var in body.invars[: self._consts]}
        rows = {var: env[var] for var in body.invars[first:]}
        length = next((row.shape[0] for row in rows.values()), self._eqn.params["length"])
        rows |= _together(parts.before, fixed, rows, parts.hoisted, length)
        ends, stacks = self._loop(fixed, [env[self._states[j]] for j in self._on], rows, length)
        ys = body.outvars[self._carried :]
        wanted = variables([*ys, *(var for one in parts.sums.values() for var in one.of)])
        rows |= stacks
        rows |= _together(parts.after, fixed, rows, wanted, length)
        on = iter(ends)
        state = [
            env[self._states[j]] + self._sum(parts.sums[j], rows, self._states[j].aval) if j in parts.sums else next(on)
            for j in range(self._carried)
        ]
        return [*state, *(rows[y] if not is_literal(y) and y in rows else _repeated(y, fixed, length) for y in ys)]

    def _loop(
        self, fixed: Mapping[Any, Any], init: Arrays, rows: Mapping[Any, Any], length: int
    ) -> tuple[Arrays, dict[Any, Any]]:
        """(what is carried in the end, by variable what is stacked)."""
        parts = self._parts
        outs, states = [self._body.outvars[j] for j in self._on], [self._states[j] for j in self._on]
        # What a turn gets is what the turn before it made: one stack is enough for both.
        pairs = [(s, out) for s, out in zip(states, outs, strict=True) if not is_literal(out)]
        shifted = {s: out for s, out in pairs if s is not out and s in parts.stacked and out in parts.stacked}
        stacked = [var for var in parts.stacked if var not in shifted]
        reads = {*read_by(parts.core), *variables(outs)}
        own = {var: row for var, row in rows.items() if var in reads}

        def turn(state: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
            env = {**fixed, **dict(zip(states, state, strict=True)), **dict(zip(own, xs, strict=True))}
            evaluate_in(parts.core, env)
            return read(env, outs), read(env, stacked)

        settings = {name: self._eqn.params[name] for name in ("reverse", "unroll")}
        ends, stacks = lax.scan(turn, init, list(own.values()), length=length, **settings)
        found = dict(zip(stacked, stacks, strict=True))
        for state, out in shifted.items():
            first, whole = init[states.index(state)][None], found[out]
            found[state] = jnp.concatenate([whole[1:], first] if settings["reverse"] else [first, whole[:-1]])
        return ends, found

    def _sum(self, one: _Sum, rows: Mapping[Any, Any], aval: Any) -> Any:
        """What all turns add."""
        if one.product is None:
            return rows[one.of[0]].sum(0, dtype=aval.dtype)
        contracted, batch = one.product.params["dimension_numbers"]
        next_to = lambda dims: tuple(dim + 1 for dim in dims)
        numbers = tuple((0, *next_to(dims)) for dims in contracted), tuple(map(next_to, batch))
        params = {**one.product.params, "dimension_numbers": numbers, "preferred_element_type": aval.dtype}
        [total] = bind(one.product.replace(params=params), [rows[var] for var in one.of])
        for view in reversed(one.views):
            [total] = bind(view, [total])
        return total


def _together(
    eqns: Sequence[Any], fixed: Mapping[Any, Any], rows: Mapping[Any, Any], wanted: Sequence[Any], length: int
) -> dict[Any, Any]:
    """What equations make, for all turns at once.

    Args:
      eqns: of a body.
      fixed, rows: values that are the same in all turns, and stacks of the others.
      wanted: variables; those that are not made here are left out.
      length: how many turns there are.
    """
    flow = Dataflow(eqns)
    wanted = [var for var in dict.fromkeys(wanted) if var in flow.place]
    eqns = flow.needed(wanted)
    reads = read_by(eqns)
    own = {var: row for var, row in rows.items() if var in reads}

    def turn(xs: Arrays) -> Arrays:
        env = {**fixed, **dict(zip(own, xs, strict=True))}
        evaluate_in(eqns, env)
        return read(env, wanted)

    made = jax.vmap(turn, axis_size=length)(list(own.values())) if wanted else []
    return dict(zip(wanted, made, strict=True))


def _repeated(y: Any, fixed: Mapping[Any, Any], length: int) -> Any:
    """What is the same in all turns, for each of them."""
    value = jnp.asarray(y.val, y.aval.dtype) if is_literal(y) else fixed[y]
    return jnp.broadcast_to(value, (length, *value.shape))
