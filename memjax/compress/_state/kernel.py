"""A region of an update as one kernel for NVIDIA GPUs: a program has some blocks in its registers, from codes to codes.

Codes, gradients and weights are read once, and what takes their place is written to their memory. Integer operations bound the
speed as much as memory does.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from memjax._core.program.dataflow import is_literal
from memjax.compress._codecs import kernels
from memjax.compress._codecs.bits import u32
from memjax.compress._state import minifloat, noise, operations
from memjax.compress._state.minifloat import BLOCK

_FEWEST = 2**16  # values of an array for which the kernel pays
_MOST = 2**31  # of an array: places in it are of 32 bits
_FEWEST_ROWS, _ROWS = 8, {1: 32, 2: 16}  # blocks of a program, by parts
_VALUES = {1: 8, 2: 16}  # of a thread: of the sizes that were tried on an H100 and an H200 the fastest

_ELEMENTWISE = """
abs add add_any and bitcast_convert_type convert_element_type div eq exp exp2 expm1 ge gt integer_pow le log log1p
logistic lt max min mul ne neg not optimization_barrier or pow rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sqrt square stop_gradient sub tanh xor
"""
_HAS = frozenset(_ELEMENTWISE.split())
_DTYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "int32", "uint32", "int16", "uint16", "uint8", "bool")))


def has(eqn: Any) -> bool:
    """Whether Pallas has this elementwise equation in kernels, or it is a barrier, which has one value there anyway."""
    return eqn.primitive.name in _HAS and all(atom.aval.dtype in _DTYPES for atom in (*eqn.invars, *eqn.outvars))


def suits(shape: tuple[int, ...]) -> bool:
    """Whether blocks of arrays of this shape lie one after another in memory, and a kernel is worth it."""
    count = math.prod(shape)
    is_whole = bool(shape) and shape[-1] % BLOCK == 0 and count % (_FEWEST_ROWS * BLOCK) == 0
    return is_whole and _FEWEST <= count < _MOST


def suits_turns(shape: tuple[int, ...]) -> bool:
    """The same of each entry along the first axis, which a turn of a loop has."""
    return suits(shape[1:])


def can_run(region: Any) -> bool:
    """Whether what is read and written are codes, and arrays of numbers."""
    is_decoded = lambda eqn: eqn.primitive is operations.DECODE and any(var not in region.inputs for var in eqn.invars)
    atoms = [*region.inputs, *region.outputs]
    return not any(map(is_decoded, region.eqns)) and all(
        atom.aval.dtype in _DTYPES and not (atom.aval.shape and atom.aval.dtype == jnp.bool_) for atom in atoms
    )


def run(region: Any, values: Sequence[Array], turn: Array | None = None) -> list[Array]:
    """The outputs of a region for the values of its inputs.

    Args:
      region: what is computed.
      values: of its inputs; arrays have one entry along their first axis if there is a `turn`.
      turn: the number of the entry. Which way values are rounded follows from their places in the whole array.
    """
    interpret = not kernels.has_kernels()  # in tests
    turns = 1 if turn is None else region.shape[0]
    blocks = math.prod(region.shape) // turns // BLOCK
    rows = math.gcd(blocks, _ROWS[_parts(region)])
    place = {var: i for i, var in enumerate(region.inputs)}
    aliases, outs = {}, []
    for i, (out, old) in enumerate(zip(region.outputs, region.old, strict=True)):
        dtype = out.aval.dtype
        is_place = old in place and old.aval.shape == out.aval.shape and old.aval.dtype.itemsize == dtype.itemsize
        if is_place and place[old] not in aliases:
            aliases[place[old]], dtype = i, old.aval.dtype
        outs.append(((out.aval.size // turns,), dtype))
    args = [value.astype(jnp.int32) if value.dtype == jnp.bool_ else value for value in values]
    args += [1 / values[place[var]] for var in _divisors(region)]
    args += [] if turn is None else [turn.astype(jnp.uint32) * u32(blocks * BLOCK % 2**32)]
    results = kernels.call_on_whole_arrays(
        functools.partial(_body, region, rows, interpret),
        [arg.reshape(-1) for arg in args],
        outs,
        programs=blocks // rows,
        warps=max(1, rows * BLOCK // (32 * _VALUES[_parts(region)])),
        interpret=interpret,
        input_output_aliases=aliases,
    )
    return [
        lax.bitcast_convert_type(result, out.aval.dtype).reshape(out.aval.shape[0] // turns, *out.aval.shape[1:])
        for result, out in zip(results, region.outputs, strict=True)
    ]


def _parts(region: Any) -> int:
    """How many parts of a block are computed apart: both halves, where codes of 4 bits are two in a byte."""
    codings = [eqn for eqn in region.eqns if eqn.primitive in (operations.ENCODE, operations.DECODE)]
    return 2 if any(eqn.params["bits"] == 4 for eqn in codings) else 1


def _divisors(region: Any) -> list[Any]:
    """Numbers that arrays are divided by, as bias corrections are. A division takes ten instructions."""
    pairs = [
        eqn.invars for eqn in region.eqns if eqn.primitive.name == "div" and eqn.outvars[0].aval.dtype == jnp.float32
    ]
    return [*dict.fromkeys(var for _, var in pairs if not is_literal(var) and not var.aval.shape)]


def _body(region: Any, rows: int, interpret: bool, *refs: Any) -> None:
    tile = _Tile(region, rows, interpret, refs)
    for eqn in region.eqns:
        tile.run(eqn)
    for var, ref in zip(region.outputs, refs[-len(region.outputs) :], strict=True):
        tile.write(var, ref)


class _Tile:
    """Some blocks of the arrays of a region, in a kernel.

    Codes of 4 bits have the first half of a block in the lower bits. Where there are such, all is computed for halves, two parts,
    so that no value changes its place in registers.
    """

    def __init__(self, region: Any, rows: int, interpret: bool, refs: Sequence[Any]):
        self.parts = _parts(region)
        self.shape, self.interpret = (rows, BLOCK // self.parts), interpret
        self.row = pl.program_id(0) * rows + lax.iota(jnp.int32, rows)
        column = lax.broadcasted_iota(jnp.int32, self.shape, 1)
        self.in_array = [self.row[:, None] * BLOCK + (column + i * self.shape[1]) for i in range(self.parts)]
        self.in_halves = self.row[:, None] * (BLOCK // 2) + column  # of codes of 4 bits
        self.refs = dict(zip(region.inputs, refs[: len(region.inputs)], strict=True))
        divisors = _divisors(region)
        self.inverses = dict(zip(divisors, refs[len(region.inputs) :][: len(divisors)], strict=True))
        others = refs[len(region.inputs) + len(divisors) : len(refs) - len(region.outputs)]
        self.first = others[0][0] if others else None  # place in the array of the whole region
        self.makers = {eqn.outvars[0]: eqn for eqn in region.eqns}
        self.values: dict[Any, list[Array]] = {}  # in each part
        self.codes: dict[Any, tuple[list[Any], list[Array]]] = {}  # where they lie, and what they are

    def operand(self, atom: Any) -> list[Array]:
        if not atom.aval.shape:
            return [jnp.broadcast_to(self.number(atom), self.shape)] * self.parts
        if atom not in self.values:
            self.values[atom] = [self.refs[atom][index] for index in self.in_array]
        return self.values[atom]

    def number(self, atom: Any) -> Array:
        if is_literal(atom):
            return lax.full((), atom.val, atom.aval.dtype)
        value = self.refs[atom][0]
        return value != 0 if atom.aval.dtype == jnp.bool_ else value

    def run(self, eqn: Any) -> None:
        out = eqn.outvars[0]
        if eqn.primitive is operations.ENCODE:
            self._encode(eqn)
        elif eqn.primitive is operations.DECODE:
            self.values[out] = self._decoded(eqn)
        elif eqn.primitive is operations.NOISE:
            self.values[out] = self._random(eqn.invars[0], eqn.params["purpose"])
        elif eqn.primitive.name in ("broadcast_in_dim", "optimization_barrier"):
            self.values[out] = self.operand(eqn.invars[0])
        else:
            self.values[out] = self._contracted(eqn) if out.aval.dtype == jnp.float32 else self._bound(eqn)

    def write(self, var: Any, ref: Any) -> None:
        places, values = self.codes[var] if var in self.codes else (self.in_array, self.values[var])
        for place, value in zip(places, values, strict=True):
            ref[place] = lax.bitcast_convert_type(value, ref.dtype)

    def _bound(self, eqn: Any) -> list[Array]:
        name, params = eqn.primitive.name, eqn.primitive.get_bind_params(eqn.params)
        parts, out = self._parts(eqn.invars), eqn.outvars[0].aval.dtype
        if name not in ("convert_element_type", "bitcast_convert_type", "select_n"):
            # In float32 and rounded, as XLA does it: Triton has no roots of bfloat16.
            widened = lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
            parts = [tuple(map(widened, values)) for values in parts]
        results = [eqn.primitive.bind(*values, **params).astype(out) for values in parts]
        if name not in ("max", "min", "sign") or not jnp.issubdtype(out, jnp.floating):
            return results
        # Triton's may lose a NaN.
        for atom in eqn.invars:
            pairs = zip(self.operand(atom), results, strict=True)
            results = [jnp.where(value == value, result, value) for value, result in pairs]
        return results

    def _contracted(self, eqn: Any) -> list[Array]:
        """As the compiler does it: one instruction for a sum with a product, and a product for a division by a number."""
        name, atoms = eqn.primitive.name, eqn.invars
        if name == "div" and not atoms[1].aval.shape:
            inverse = 1 / atoms[1].val if is_literal(atoms[1]) else self.inverses[atoms[1]][0]
            return [value * inverse for value in self.operand(atoms[0])]
        if name == "div" and self._is_root(atoms[1]):
            [values, roots] = map(self.operand, atoms)
            inverse = functools.partial(kernels.reciprocal, interpret=self.interpret)
            return [value * inverse(root) for value, root in zip(values, roots, strict=True)]
        if name == "add" and any(is_literal(atom) and atom.val == 0 for atom in atoms):
            return self.operand(next(atom for atom in atoms if not is_literal(atom)))
        products = [self.makers[atom] for atom in atoms if not is_literal(atom) and self._is_product(atom)]
        if name == "add" and products:
            [other] = [atom for atom in atoms if atom is not products[0].outvars[0]] or atoms[:1]
            multiply_add = functools.partial(kernels.multiply_add, interpret=self.interpret)
            return [multiply_add(*values) for values in self._parts([*products[0].invars, other])]
        return self._bound(eqn)

    def _is_product(self, var: Any) -> bool:
        return var in self.makers and self.makers[var].primitive.name == "mul"

    def _is_root(self, var: Any) -> bool:
        """Whether it is a square root, perhaps plus a small number: neither it nor its inverse is subnormal."""
        eqn = None if is_literal(var) else self.makers.get(var)
        if eqn is not None and eqn.primitive.name == "add" and is_literal(eqn.invars[1]) and 0 <= eqn.invars[1].val < 1:
            eqn = self.makers.get(eqn.invars[0])
        return eqn is not None and eqn.primitive.name == "sqrt"

    def _parts(self, atoms: Sequence[Any]) -> list[tuple[Array, ...]]:
        return list(zip(*map(self.operand, atoms), strict=True))

    def _random(self, seed: Any, purpose: int) -> list[Array]:
        places = [u32(place) if self.first is None else u32(place) + self.first for place in self.in_array]
        return [noise.at(place, self.number(seed), purpose) for place in places]

    def _decoded(self, eqn: Any) -> list[Array]:
        codes, exponents = (self.refs[var] for var in eqn.invars)
        bits, signed = eqn.params["bits"], eqn.params["signed"]
        if bits == 4:
            both = u32(codes[self.in_halves])
            levels = [both, both >> u32(4)]
        else:
            levels = [u32(codes[place]) for place in self.in_array]
        exponent = exponents[self.row][:, None]
        found = minifloat.block_values(levels, exponent, bits, signed, subnormals=not self.interpret)
        return [value.astype(eqn.params["dtype"]) for value in found]

    def _encode(self, eqn: Any) -> None:
        (x, seed), (codes, exponents) = eqn.invars, eqn.outvars
        bits, signed = eqn.params["bits"], eqn.params["signed"]
        wide = [value.astype(jnp.float32) for value in self.operand(x)]
        random = self._random(seed, minifloat.stream_of(signed))
        levels, found = minifloat.block_levels(wide, random, bits, signed, 1, subnormals=not self.interpret)
        if bits == 4:
            self.codes[codes] = [self.in_halves], [minifloat.packed(levels)]
        else:
            self.codes[codes] = self.in_array, [minifloat.packed([level]) for level in levels]
        self.codes[exponents] = [self.row], [found[:, 0]]
