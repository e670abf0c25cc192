"""FLOPs of products, and bytes sent between devices, of a compiled program: from its text, loops by their number of turns."""

import math
import re
from typing import NamedTuple

from memjax._core.program.hlo import Computation, Instruction, parse

_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


class Work(NamedTuple):
    """What one device does in a program.

    Attributes:
      flops: of products.
      sent: bytes that it sends in collectives, each being done round a ring.
    """

    flops: float = 0.0
    sent: float = 0.0


def work(text: str) -> Work:
    """The work of a program by its text, `compiled.as_text()`."""
    module = parse(text)

    def of(name: str) -> Work:
        computation = module.computations[name]
        found = [_own(computation, one) for one in computation.instructions.values()]
        for one in computation.instructions.values():
            turns = 1
            if one.opcode == "while":
                match = _TURNS.search(one.text)
                assert match, f"a loop of unknown length: {one.name}"
                turns = int(match[1])
            inside = [of(called) for called in (*one.called.values(), *one.branches)]
            found += [Work(turns * one.flops, turns * one.sent) for one in inside]
        return Work(sum(one.flops for one in found), sum(one.sent for one in found))

    return of(module.entry)


def _own(computation: Computation, one: Instruction) -> Work:
    """The work of an instruction but for the computations that it calls."""
    nbytes = sum(array.nbytes for array in one.arrays)
    operands = [computation.instructions[name].arrays for name in one.operands]
    if one.opcode == "dot":
        match = _CONTRACTED.search(one.text)
        contracted = math.prod(operands[0][0].shape[int(dim)] for dim in match[1].split(",") if dim) if match else 1
        return Work(2 * math.prod(one.arrays[0].shape) * contracted)
    members = _members(one.text)
    share = (members - 1) / members
    match one.opcode.removesuffix("-start"):
        case "all-gather" | "all-to-all":
            return Work(0, share * nbytes)
        case "all-reduce":
            return Work(0, 2 * share * nbytes)
        case "reduce-scatter":
            return Work(0, share * sum(array.nbytes for arrays in operands for array in arrays))
        case "collective-permute":
            return Work(0, nbytes)
    return Work()


def _members(text: str) -> int:
    """How many devices take part in a collective of these attributes."""
    if listed := _LISTED.search(text):
        return len(listed[1].split(","))
    if counted := _COUNTED.search(text):
        return int(counted[1])
    if not (named := _NAMED.search(text)):
        return 1
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
    # An axis may take part in parts: 'name':(1)4.
    return math.prod(
        int(part) if part else sizes[name] for name, part in re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
    )
