"""Bytes that the kernels of a compiled program read and write, from its text.

Of two programs with the same products, the one that moves fewer bytes is the faster: all that is between products waits for
memory.
"""

from __future__ import annotations

import dataclasses
import re

from memjax._core import hlo
from memjax._core.hlo import Computation, Instruction, Module

_NO_KERNEL = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all", "partition-id")
)
_SAME_BYTES = frozenset(("bitcast", "get-tuple-element", "reshape", "opt-barrier"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def moved_bytes(text: str) -> int:
    """Bytes read and written, those of a loop as often as it turns; a loop of unknown length counts once.

    Args:
      text: `compiled.as_text()`.
    """
    module = hlo.parse(text)
    return _moved(module, module.computations[module.entry]) if module.entry else 0


def _moved(module: Module, computation: Computation) -> int:
    total = 0
    for instruction in computation.instructions.values():
        inside = [module.computations[name] for name in instruction.called.values() if name in module.computations]
        if instruction.opcode == "while":
            turns = _TURNS.search(instruction.text)
            total += (int(turns[1]) if turns else 1) * sum(_moved(module, one) for one in inside)
        elif instruction.opcode == "conditional":
            branches = [module.computations[name] for name in instruction.branches]
            total += max((_moved(module, one) for one in [*branches, *inside]), default=0)
        elif instruction.opcode in ("call", "async-start"):
            total += sum(_moved(module, one) for one in inside)
        elif instruction.opcode not in _NO_KERNEL:
            total += _of_kernel(module, computation, instruction)
    return total


def _of_kernel(module: Module, computation: Computation, instruction: Instruction) -> int:
    """What one kernel reads and writes. Of an array of which it takes slices, or writes one in place, only these count."""
    there = computation.instructions
    called = instruction.called.get("calls")
    if instruction.opcode != "fusion" or called not in module.computations:
        operands = [there[name] for name in instruction.operands if name in there]
        body = Computation("", {one.name: dataclasses.replace(one, operands=[]) for one in operands})
        body.instructions[instruction.name] = instruction
        written = _written(body, instruction) - _scratch(computation, instruction)
        return sum(_read(body, name) for name in dict.fromkeys(instruction.operands)) + written
    body = module.computations[called]
    parameters = [name for name, one in body.instructions.items() if one.opcode == "parameter"]
    return sum(_read(body, name) for name in parameters) + _written(body, body.instructions[body.root])


def _read(body: Computation, name: str) -> int:
    """Bytes that a kernel reads of one of its operands."""
    if name not in body.instructions:
        return 0
    whole = sum(array.nbytes for array in body.instructions[name].arrays)
    sliced = 0
    for reader in _readers(body, name):
        first = reader.operands[:1] and _origin(body, reader.operands[0]) == name
        if reader.opcode in _SLICES and first:
            sliced += sum(array.nbytes for array in reader.arrays)
        elif not (reader.opcode in ("dynamic-update-slice", "scatter") and first):
            return whole
    return min(whole, sliced)


def _written(body: Computation, root: Instruction) -> int:
    """Bytes that a kernel writes."""
    if root.opcode == "tuple":
        return sum(_written(body, body.instructions[name]) for name in root.operands)
    while root.opcode in ("bitcast", "reshape") and root.operands and root.operands[0] in body.instructions:
        root = body.instructions[root.operands[0]]
    if root.opcode in ("dynamic-update-slice", "scatter") and len(root.operands) > 1:
        update = body.instructions.get(root.operands[-1 if root.opcode == "scatter" else 1])
        return sum(array.nbytes for array in update.arrays) if update else 0
    return sum(array.nbytes for array in root.arrays)


def _scratch(computation: Computation, instruction: Instruction) -> int:
    """Bytes of the results of a library's call that nothing reads: room to work in, whose size says nothing of its use."""
    if instruction.opcode != "custom-call" or instruction.parts is None or computation.root == instruction.name:
        return 0
    readers = [one for one in computation.instructions.values() if instruction.name in one.operands]
    if any(one.opcode != "get-tuple-element" for one in readers):
        return 0
    arrays, numbers = iter(instruction.arrays), {one.number for one in readers}
    sizes = [sum(next(arrays).nbytes for _ in range(count)) for count in instruction.parts]
    return sum(nbytes for number, nbytes in enumerate(sizes) if number not in numbers)


def _readers(body: Computation, name: str) -> list[Instruction]:
    """What reads an array, also under another name."""
    found = []
    for one in body.instructions.values():
        if name in one.operands:
            found += _readers(body, one.name) if one.opcode in _SAME_BYTES else [one]
    return found


def _origin(body: Computation, name: str) -> str:
    """The array that a name stands for."""
    one = body.instructions[name]
    while one.opcode in _SAME_BYTES and one.operands and one.operands[0] in body.instructions:
        one = body.instructions[one.operands[0]]
    return one.name
