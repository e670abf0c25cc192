"""Updates of optimizers with a kernel for each array of weights: from codes to codes, with each array read and written once.

An optimizer is any function. So its update is traced, and where its arithmetic is elementwise, from decoded state to what is
encoded, it becomes the body of a kernel. The rest runs as it is: counts, schedules, norms of gradients, small arrays. What the
compiler makes of the same has the moments in float32 between two passes: 32 bytes a parameter with float32 weights, not 16.

An update stays with the compiler if arrays are encoded after a number that depends on decoded state as a whole, as a trust ratio
does, or by operations that kernels do not have.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from memjax._core.compat import bodies, is_batched, is_tracer
from memjax._core.program.dataflow import Walk, is_literal, variables
from memjax._core.program.jaxpr import Program, bind, calls_in_place, read
from memjax.compress._codecs.kernels import has_kernels, is_of_one_device
from memjax.compress._state import kernel, kernel_call, operations
from memjax.compress._state.operations import OPERATIONS

Update = Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Region:
    """What a kernel computes of arrays of one shape.

    Attributes:
      shape: of the arrays that are not codes.
      eqns: in order.
      inputs: arrays of this shape, codes and exponents, and numbers.
      outputs: arrays of this shape, codes and exponents.
      old: for each output, the input that it replaces, whose memory it may have, or None.
    """

    shape: tuple[int, ...]
    eqns: list[Any]
    inputs: list[Any]
    outputs: list[Any]
    old: list[Any]

    def __repr__(self) -> str:
        """Alike in all processes, as names of plans need it."""
        names: dict[Any, str] = {}
        name = lambda atom: str(atom.val) if is_literal(atom) else names.setdefault(atom, f"v{len(names)}")
        lines = [f"{self.shape}, {[name(var) for var in self.inputs]}"]
        for eqn in self.eqns:
            lines.append(f"{eqn.primitive} {eqn.params} {[name(atom) for atom in (*eqn.invars, *eqn.outvars)]}")
        return "; ".join([*lines, str([name(var) for var in self.outputs])])


def by_kernels(update: Update) -> Update:
    """`update`, by kernels where there are any for it.

    Args:
      update: from a tree of what it replaces, and more, to a tree of the same structure in its place, and more.
    """

    def run(old: Any, *args: Any) -> Any:
        if operations.are_equations() or not has_kernels():
            return update(old, *args)
        tree: Any
        leaves, tree = jax.tree.flatten((old, *args))
        places = [i for i, leaf in enumerate(leaves) if is_tracer(leaf)]
        # Outside of `jax.jit` each operation is a kernel anyway.
        is_known = lambda leaf: is_of_one_device(jax.typeof(leaf)) and not is_batched(leaf)
        if not places or not all(is_known(leaves[i]) for i in places):
            return update(old, *args)

        def of_arrays(*arrays: Any) -> Any:
            filled = dict(zip(places, arrays, strict=True))
            return update(*tree.unflatten([filled.get(i, leaf) for i, leaf in enumerate(leaves)]))

        arrays = [leaves[i] for i in places]
        with operations.as_equations():
            closed, outs = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        out_tree: Any = jax.tree.structure(outs)
        program = calls_in_place(closed, differentiable=False)
        count = len(jax.tree.leaves(old))
        inputs = dict(zip(places, program.invars, strict=True))
        replaced = {}
        if len(jax.tree.leaves(outs[0])) == count:
            replaced = {out: inputs[i] for i, out in enumerate(program.outvars[:count]) if i in inputs}
        regions = regions_of(program, replaced)
        order = _ordered(program, regions)
        if not regions or order is None or not all(map(kernel.can_run, regions)) or any(map(_has_inside, order)):
            return update(old, *args)  # anew: updates inside of it, as in a branch, may have kernels
        env = program.given(arrays)
        for part in order:
            _run(part, env)
        return out_tree.unflatten(read(env, program.outvars))

    return run


def _run(part: Any, env: dict[Any, Any]) -> None:
    if isinstance(part, Region):
        outs, results = part.outputs, kernel_call.call(part, read(env, part.inputs))
    elif part.primitive in OPERATIONS:
        outs, results = part.outvars, operations.run(part.primitive, *read(env, part.invars), **part.params)
    else:
        outs, results = part.outvars, bind(part, read(env, part.invars))
    for out, result in zip(outs, results, strict=True):
        env.setdefault(out, result)


def regions_of(program: Program, replaced: dict[Any, Any]) -> list[Region]:
    """The regions of a program; `replaced` are its inputs that its outputs replace."""
    flow = program.flow
    shapes = {i: shape for i, eqn in enumerate(flow.eqns) if (shape := _shape(eqn)) is not None}
    # Between codes, in groups that share arrays.
    group: dict[Any, list[int]] = {}
    for i, shape in shapes.items():
        eqn = flow.eqns[i]
        before = [group[var] for var in dict.fromkeys(flow.reads[i]) if var in group and var.aval.shape == shape]
        if not before and eqn.primitive not in OPERATIONS:
            continue
        merged = before[0] if before else []
        for other in before[1:]:
            if other is not merged:
                merged += other
                group.update({out: merged for j in other for out in flow.eqns[j].outvars})
        merged.append(i)
        group.update(dict.fromkeys(eqn.outvars, merged))
    groups = {id(numbers): numbers for numbers in group.values()}.values()
    coded = [numbers for numbers in groups if any(flow.eqns[i].primitive is operations.ENCODE for i in numbers)]
    return [_region(program, sorted(numbers), shapes, replaced) for numbers in coded]


def _region(program: Program, numbers: list[int], shapes: dict[int, Any], replaced: dict[Any, Any]) -> Region:
    flow, shape = program.flow, shapes[numbers[0]]
    between = {out for i in numbers for out in flow.eqns[i].outvars}
    chosen, outside = set(numbers), set(program.outvars)
    # And what these read, where that is as elementwise. Others who read it compute it, too.
    walk = Walk(var for i in numbers for var in flow.reads[i])
    for var in walk:
        i = flow.place.get(var)
        if i is not None and shapes.get(i) == shape and i not in chosen:
            chosen.add(i)
            walk.add(flow.reads[i])
    eqns = [flow.eqns[i] for i in sorted(chosen)]
    made = dict.fromkeys(out for eqn in eqns for out in eqn.outvars)
    is_read = lambda var: any(i not in chosen for i in flow.readers.get(var, ()))
    outputs = [var for var in made if var in outside or (var in between and is_read(var))]
    inputs = [var for var in dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars)) if var not in made]
    return Region(shape, eqns, inputs, outputs, [replaced.get(var) for var in outputs])


def _ordered(program: Program, regions: Iterable[Region]) -> list[Any] | None:
    """Regions, and the equations that are needed beside them, in an order in which they can run; None: there is no such order."""
    by_region = {out: region for region in regions for out in region.outputs}
    needed, walk = {}, Walk([*program.outvars, *(var for i in program.flow.acting for var in program.flow.reads[i])])
    for i in program.flow.acting:
        needed[id(program.eqns[i])] = program.eqns[i]
    for var in walk:
        part = by_region.get(var) or program.flow.makers.get(var)
        if part is not None and id(part) not in needed:
            needed[id(part)] = part
            walk.add(part.inputs if isinstance(part, Region) else part.invars)
    first = {id(eqn): i for i, eqn in enumerate(program.eqns)}
    place = lambda part: first[id(part.eqns[-1] if isinstance(part, Region) else part)]
    waiting, order = sorted(needed.values(), key=place), []
    known = {*program.constvars, *program.invars}
    while waiting:
        later = []
        for part in waiting:
            if known.issuperset(part.inputs if isinstance(part, Region) else variables(part.invars)):
                order.append(part)
                known.update(part.outputs if isinstance(part, Region) else part.outvars)
            else:
                later.append(part)
        if len(later) == len(waiting):
            return None
        waiting = later
    return order


def _has_inside(part: Any) -> bool:
    """Whether operations are in the body of a loop or of a branch, where nothing here can run them."""
    inside = [] if isinstance(part, Region) else [eqn for body in bodies(part) for eqn in body.eqns]
    return any(eqn.primitive in OPERATIONS or _has_inside(eqn) for eqn in inside)


def _shape(eqn: Any) -> tuple[int, ...] | None:
    """The shape of the arrays of an equation that can run inside a kernel; None if it cannot."""
    params, avals = eqn.params, [atom.aval for atom in eqn.invars]
    if eqn.primitive is operations.ENCODE:
        shape = avals[0].shape
    elif eqn.primitive in OPERATIONS:
        shape = params["shape"]
    else:
        shape = eqn.outvars[0].aval.shape if len(eqn.outvars) == 1 else ()
        is_copy = eqn.primitive.name == "broadcast_in_dim" and not avals[0].shape
        if not is_copy and not (kernel.has(eqn) and all(aval.shape in (shape, ()) for aval in avals)):
            return None
    return shape if kernel.suits(shape) or kernel.suits_turns(shape) else None
