"""Which values XLA:CPU writes to memory for kernels of its library, YNNPACK.

XLA makes one kernel of a reduction and operations around it: the operation that alone reads its result, and so on, and those,
products included, that nothing else reads. What else a kernel reads is written to memory first.

That holds for broadcasts, too. Other operations broadcast what they read, each for itself. A kernel does so only if nothing
outside of it reads the same broadcast. So some arrays are kept for the backward pass in the shape of what they are multiplied
with there, as the forward pass reads them, too: the reciprocal sum of a softmax, the scale of a norm, a mask for all heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from memjax._core.program.costs import is_fusible, kind_of, stored
from memjax._core.program.dataflow import Dataflow, aliases, is_literal, reading, variables
from memjax._core.program.primitives import (
    ALIASES,
    BARRIER,
    ELEMENTWISE,
    LIBRARY_OPERATIONS,
    LIBRARY_POOLS,
    LIBRARY_REDUCTIONS,
    WRITTEN,
)

_written = core.Primitive(WRITTEN)
_DTYPES = ("float32", "float64", "bfloat16")
_LEAST = 4096  # elements of the result, or of an operand


def with_written(flow: Dataflow, outputs: Iterable[Any]) -> Dataflow:
    """The equations, and one more for each value that is written for a kernel, which is read from there."""
    whole, results = _Whole(flow.eqns), variables(outputs)
    flow = Dataflow(whole.eqns)
    kernels = _Kernels(flow, {*results})
    elsewhere = dict(whole.instead)  # who else reads a broadcast makes it
    inside = {out: atom for out, atom in elsewhere.items() if flow.place[out] not in kernels.written}
    eqns: list[Any] = []
    for i, eqn in enumerate(flow.eqns):
        out: Any = next(iter(eqn.outvars), None)  # what only has an effect makes nothing
        if out in whole.instead:
            if i in kernels.written:
                eqns.append(eqn.replace(primitive=_written, params={}))
            continue
        names = inside if i in kernels.of or eqn.primitive.name in ALIASES else elsewhere
        eqn = reading(eqn, names)
        if kernels.of.get(i) == i and eqn.primitive.name in LIBRARY_POOLS:  # what it reads may be inside of the kernel
            eqn = eqn.replace(primitive=_written, params={})
        eqns.append(eqn)
        if i in kernels.written:
            inside[out] = core.Var(out.aval)
            if kind_of(eqn.primitive.name).is_transcendental:  # elsewhere it is not computed again, either
                elsewhere[out] = inside[out]
            eqns.append(eqn.replace(primitive=_written, params={}, invars=[out], outvars=[inside[out]]))
    return _without_copies(eqns, results)


def _without_copies(eqns: list[Any], outputs: Sequence[Any]) -> Dataflow:
    """The equations without those that write what is in memory anyway."""
    flow = Dataflow(eqns)
    in_memory = stored(flow, [*outputs, *flow.outside], "cpu")
    names: dict[Any, Any] = {}
    found = []
    for eqn in eqns:
        if eqn.primitive.name == WRITTEN and not is_literal(eqn.invars[0]):
            [atom, *_], [out] = eqn.invars, eqn.outvars
            if atom in in_memory and atom.aval.shape == out.aval.shape:
                names[out] = atom
                continue
        found.append(reading(eqn, names))
    return Dataflow(found)


class _Whole:
    """Equations in which what elementwise ones read has the shape of the result: broadcasts are equations of their own.

    Attributes:
      eqns: the equations. Equal broadcasts are one.
      instead: by array that a broadcast makes, what was read in its place.
    """

    def __init__(self, eqns: Iterable[Any]):
        self.eqns: list[Any] = []
        self.instead: dict[Any, Any] = {}
        self._made: dict[Any, Any] = {}
        self._origins: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # what was broadcast, along which dimensions
        for eqn in eqns:
            if eqn.primitive.name in ELEMENTWISE and len(eqn.outvars) == 1:
                whole = [self._whole(eqn, atom) for atom in eqn.invars]
                if any(one is not atom for one, atom in zip(whole, eqn.invars, strict=True)):
                    eqn = eqn.replace(invars=whole)
            elif eqn.primitive.name == "broadcast_in_dim":
                self._origins[eqn.outvars[0]] = self._broadcast(eqn)
            self.eqns.append(eqn)

    def _broadcast(self, eqn: Any) -> tuple[Any, tuple[int, ...]]:
        atom = eqn.invars[0]
        of, along = self._origin(atom)
        return of, tuple(eqn.params["broadcast_dimensions"][dim] for dim in along)

    def _origin(self, atom: Any) -> tuple[Any, tuple[int, ...]]:
        if is_literal(atom):
            return (atom.aval.dtype, np.asarray(atom.val).tobytes()), ()
        return self._origins.get(atom) or (atom, tuple(dim for dim, size in enumerate(atom.aval.shape) if size != 1))

    def _whole(self, eqn: Any, atom: Any) -> Any:
        result = eqn.outvars[0].aval
        if result.size == 1 or (not is_literal(atom) and atom not in self._origins and atom.aval.shape == result.shape):
            return atom
        key = *self._origin(atom), result.shape
        if key not in self._made:
            self._made[key] = out = core.Var(result.update(dtype=atom.aval.dtype))
            self.instead[out] = atom
            self.eqns.append(eqn.replace(primitive=jax.lax.broadcast_in_dim_p, params={}, invars=[atom], outvars=[out]))
        return self._made[key]


class _Kernels:
    """The kernels of equations, which go by their numbers here.

    Attributes:
      of: by equation in a kernel, the reduction that the kernel began with.
      written: equations whose results are written because a kernel reads them.
    """

    def __init__(self, flow: Dataflow, outputs: set[Any]):
        self._eqns = flow.eqns
        names = aliases(eqn for eqn in flow.eqns if eqn.primitive.name != BARRIER)
        self._reads = [[flow.place[var] for var in roots if var in flow.place] for roots in flow.roots_by(names)]
        self._readers: dict[int, set[int]] = {}
        for i, eqn in enumerate(flow.eqns):
            if eqn.primitive.name not in ALIASES or eqn.primitive.name == BARRIER:
                for j in self._reads[i]:
                    self._readers.setdefault(j, set()).add(i)
        self._leaves = {flow.place[var] for var in (names.get(var, var) for var in outputs) if var in flow.place}
        self.of: dict[int, int] = {}
        for i in range(len(flow.eqns) - 1, -1, -1):
            if i not in self.of and _begins(flow.eqns[i]):
                self._grow(i)
        self.written = {
            j
            for i, start in self.of.items()
            for j in self._reads[i]
            if self.of.get(j) != start and is_fusible(flow.eqns[j]) and j not in self._leaves
        }

    def _grow(self, start: int) -> None:
        inside, last = [start], start
        self.of[start] = start
        while True:
            for i in inside:  # it grows meanwhile
                for j in self._reads[i]:
                    if self._is_free(j) and all(self.of.get(reader) == start for reader in self._readers[j]):
                        self.of[j] = start
                        inside.append(j)
            readers = self._readers.get(last, set())
            if len(readers) != 1 or last in self._leaves or not self._is_free(*readers):
                return
            [last] = readers
            self.of[last] = start
            inside.append(last)

    def _is_free(self, i: int) -> bool:
        """Whether a kernel can take the equation."""
        return i not in self.of and _is_taken(self._eqns[i]) and (i not in self._leaves)


def _is_taken(eqn: Any) -> bool:
    """Whether a kernel can have the equation inside. Rows of what a product sums have to lie side by side."""
    name, arrays = eqn.primitive.name, [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    if name in LIBRARY_REDUCTIONS and arrays[0].size == arrays[-1].size:  # over dimensions of size 1
        return True
    if name not in LIBRARY_OPERATIONS or not _has_dtypes(arrays):
        return False
    if name == "dot_general":
        (summed, _), _ = eqn.params["dimension_numbers"]
        return arrays[0].ndim - 1 in summed
    return name == "broadcast_in_dim" or max(aval.size for aval in arrays) >= _LEAST


def _begins(eqn: Any) -> bool:
    """Whether a kernel begins with the equation."""
    arrays = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    is_reduction = eqn.primitive.name in LIBRARY_REDUCTIONS and arrays[0].size > arrays[-1].size
    return (is_reduction or _is_pool(eqn)) and _has_dtypes(arrays) and arrays[0].size >= _LEAST


def _is_pool(eqn: Any) -> bool:
    """Whether it reduces windows that do not overlap."""
    name, params = eqn.primitive.name, eqn.params
    return name in LIBRARY_POOLS and all(
        size in (1, step) and (size > 1 or step == 1) and dilations == [1, 1]
        for size, step, *dilations in zip(
            params["window_dimensions"],
            params["window_strides"],
            params["base_dilation"],
            params["window_dilation"],
            strict=True,
        )
    )


def _has_dtypes(arrays: Iterable[Any]) -> bool:
    return all(str(aval.dtype) in _DTYPES for aval in arrays)
