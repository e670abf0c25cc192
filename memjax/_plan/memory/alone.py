"""Temporary memory of a program compiled by itself, on the devices of a surrounding `jax.shard_map` where there is one."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from memjax._core.compat import names_an_axis, varying
from memjax._core.program import hlo
from memjax._core.program.hlo import Array
from memjax._measure import remat_compiler_options

_SAME_BYTES = frozenset(("bitcast", "tuple", "get-tuple-element", "opt-barrier"))
_NOT_CONSTANT = frozenset(
    ("parameter", "partition-id", "replica-id", "rng", "rng-get-and-update-state", "infeed", "recv")
)


def compile_alone(closed: Any) -> Any | None:
    """Compiles a closed jaxpr by itself, inside `shard_map` for one device's arrays. None if that cannot be done.

    A jaxpr traced inside `shard_map` over all axes of a mesh is compiled for as many local devices, its values split as
    they are there. What is laid out over a mesh otherwise, or uses axes of `jax.vmap`, is no program of its own.
    """
    options: dict[str, Any] = dict(remat_compiler_options())
    if jax.default_backend() == "cpu":
        options["xla_backend_optimization_level"] = 0  # machine code is made after memory has been assigned
    named = any(names_an_axis(effect) for effect in closed.jaxpr.effects)
    avals = [aval for aval in (*closed.in_avals, *closed.out_avals) if hasattr(aval, "sharding")]
    meshes = {aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty}
    run = jaxpr_as_fun(closed)
    if not meshes and not named:
        return jax.jit(run).lower(*closed.in_avals).compile(compiler_options=options)
    (mesh,) = meshes if len(meshes) == 1 else (None,)
    manual = jax.sharding.AxisType.Manual
    if mesh is None or mesh.size > jax.local_device_count() or set(mesh.axis_types) != {manual}:
        return None

    def axes_of(aval: Any) -> tuple[str, ...]:
        return tuple(sorted(varying(aval)))

    def spec(aval: Any) -> Any:
        return jax.sharding.PartitionSpec(axes_of(aval))

    def whole(aval: Any) -> Any:  # each device's array is a row
        return jax.ShapeDtypeStruct((math.prod(mesh.shape[axis] for axis in axes_of(aval)), *aval.shape), aval.dtype)

    def rows(*values: Any) -> list[Any]:
        return [out[None] for out in run(*(value[0] for value in values))]

    devices = np.array(jax.local_devices()[: mesh.size]).reshape(mesh.axis_sizes)
    outside = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(outside):
        split = jax.shard_map(
            rows,
            mesh=jax.sharding.Mesh(devices, mesh.axis_names),
            in_specs=tuple(map(spec, closed.in_avals)),
            out_specs=[spec(aval) for aval in closed.out_avals],
            check_vma=any(map(varying, avals)),
        )
        return jax.jit(split).lower(*map(whole, closed.in_avals)).compile(compiler_options=options)


def temporary(program: Any) -> int:
    """Bytes of a compiled program's scratch memory."""
    return program.memory_analysis().temp_size_in_bytes


def constants(program: Any) -> Counter[tuple[Array, ...]]:
    """Arrays that depend on no argument, by type: the compiler may make them before anything else, and hold them.

    An example: the indices that the backward pass of a maximum over windows compares with. A CPU holds five arrays of them.
    """
    module = hlo.parse(program.as_text() or "")
    entry = module.computations[module.entry].instructions if module.entry else {}
    origin: dict[str, str] = {}  # of each constant: the instruction that made its bytes, "" for literals
    read_by_others: set[str] = set()
    for name, made in entry.items():
        constant = [operand for operand in made.operands if operand in origin]
        if made.opcode == "constant":
            origin[name] = ""  # not scratch memory, but part of the program
        elif made.opcode not in _NOT_CONSTANT and len(constant) == len(made.operands):
            origin[name] = origin[constant[0]] if made.opcode in _SAME_BYTES and constant else name
        else:
            read_by_others.update(origin[operand] for operand in constant)
    return Counter(tuple(entry[name].arrays) for name in read_by_others if name)


def bytes_of(types: Counter[tuple[Array, ...]]) -> int:
    """Bytes of arrays, each as often as it is counted."""
    return sum(count * array.nbytes for arrays, count in types.items() for array in arrays)
