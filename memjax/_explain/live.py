"""Which buffers of a compiled program are alive when: names for the same memory joined, loops and calls walked through.

The rules are those of XLA's buffer assignment: views and tuples make no buffer; a loop's state is one buffer from its start
to its end; `dynamic-update-slice`, in fusions too, writes into its operand; what an elementwise instruction reads for the
last time may become its result, if it has its shape (on GPUs, its size) and is read from the instruction that made it, not
through a view, a tuple or a barrier; and a temporary buffer takes the place of a result of at least its size where that is not
yet, or no longer, needed. Offsets are not assigned, so gaps between buffers do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memjax._core.program.hlo import Computation, Instruction, Module, aliased_operands, elements

_SAME = frozenset(("bitcast", "opt-barrier", "add-dependency", "all-reduce-done", "optimization-barrier"))
_NO_SHARING_NAMES = """
dot convolution custom-call reduce gather transpose concatenate pad slice broadcast reverse sort copy reduce-window iota
dynamic-slice rng-bit-generator fft cholesky triangular-solve select-and-scatter all-gather all-to-all collective-permute
reduce-scatter rng reshape copy-start
"""
_NO_SHARING = frozenset(_NO_SHARING_NAMES.split())


@dataclass(eq=False)
class Made:
    """An array where it is made or read: the instruction, which of its arrays, and its computation."""

    instruction: Instruction
    index: int
    computation: Computation


@dataclass(eq=False)
class Buffer:
    """Memory of one or more arrays that have to share it.

    Attributes:
      nbytes: of the largest.
      first, last: the steps from which and up to which it is alive; `last` is not included.
      makers: what writes it.
      readers: what reads it.
      is_temporary: whether it is neither an argument, nor a result, nor a constant, nor in host memory.
    """

    nbytes: int = 0
    first: int = 1 << 60
    last: int = 0
    makers: list[Made] = field(default_factory=list)
    readers: list[Made] = field(default_factory=list)
    is_temporary: bool = True


@dataclass(frozen=True)
class Live:
    """Temporary buffers, and the instruction of each second step: a buffer can end between two instructions."""

    buffers: list[Buffer]
    instructions: list[Instruction]


def live(module: Module) -> Live:
    """The temporary buffers of a scheduled program."""
    walk = _Walk(module)
    entry = module.computations[module.entry]
    parameters = [instruction for instruction in entry.instructions.values() if instruction.opcode == "parameter"]
    arguments = [walk.fresh(parameter, entry) for parameter in sorted(parameters, key=lambda one: one.number)]
    result = walk.run(entry, arguments)
    given = {id(walk.buffer(leaf)) for leaves in arguments for leaf in leaves}
    results = {id(walk.buffer(leaf)): walk.buffer(leaf) for leaf in result}
    for buffer in walk.buffers():
        buffer.is_temporary &= id(buffer) not in given and id(buffer) not in results
    walk.share()
    temporary = [buffer for buffer in walk.buffers() if buffer.is_temporary and buffer.last > buffer.first]
    own = [buffer for number, buffer in results.items() if number not in given]
    return Live(_outside_of(own, [buffer for buffer in temporary if buffer.nbytes]), walk.order)


def _outside_of(results: Sequence[Buffer], temporary: Sequence[Buffer]) -> list[Buffer]:
    """Temporary buffers that do not find a place in the memory of results; the largest choose first."""
    places: list[tuple[int, list[Buffer]]] = []
    rest = []
    ordered = [(buffer, True) for buffer in results] + [(buffer, False) for buffer in temporary]
    for buffer, is_result in sorted(ordered, key=lambda pair: -pair[0].nbytes):
        if is_result:
            places.append((buffer.nbytes, [buffer]))
            continue
        apart = lambda other, buffer=buffer: buffer.last <= other.first or other.last <= buffer.first
        free = [place for place in places if all(map(apart, place[1]))]
        if free:
            min(free, key=lambda place: place[0])[1].append(buffer)
        else:
            rest.append(buffer)
    return rest


class _Walk:
    """One pass in the order of execution. A leaf is one array; leaves that share memory are joined."""

    def __init__(self, module: Module):
        self.module = module
        self.order: list[Instruction] = []
        self._joined: list[int] = []
        self._shapes: list[tuple[int, ...]] = []
        self._buffers: list[Buffer | None] = []
        self._sharing: list[tuple[int, int, int]] = []

    def fresh(self, instruction: Instruction, computation: Computation) -> list[int]:
        """A buffer for each array of the result."""
        step = 2 * len(self.order)
        leaves = []
        for index, array in enumerate(instruction.arrays):
            temporary = not array.on_host and instruction.opcode != "constant"
            made = [Made(instruction, index, computation)]
            leaves.append(len(self._joined))
            self._joined.append(leaves[-1])
            self._shapes.append(array.shape)
            self._buffers.append(Buffer(array.nbytes, step, step + 1, made, [], temporary))
        return leaves

    def root(self, leaf: int) -> int:
        while self._joined[leaf] != leaf:
            self._joined[leaf] = self._joined[self._joined[leaf]]
            leaf = self._joined[leaf]
        return leaf

    def buffer(self, leaf: int) -> Buffer:
        found = self._buffers[self.root(leaf)]
        assert found is not None
        return found

    def buffers(self) -> list[Buffer]:
        return [buffer for buffer in self._buffers if buffer is not None]

    def join(self, leaf: int, other: int) -> None:
        """Two arrays are in the same memory."""
        kept, gone = self.root(leaf), self.root(other)
        if kept == gone:
            return
        one, two = self.buffer(kept), self.buffer(gone)
        one.nbytes = max(one.nbytes, two.nbytes)
        one.first, one.last = min(one.first, two.first), max(one.last, two.last)
        one.makers += two.makers
        one.readers += two.readers
        one.is_temporary &= two.is_temporary
        self._joined[gone], self._buffers[gone] = kept, None

    def run(self, computation: Computation, arguments: Sequence[list[int]]) -> list[int]:
        """Walk through a computation; the leaves of its result."""
        known: dict[str, list[int]] = {}
        for instruction in computation.instructions.values():
            operands = [known[name] for name in instruction.operands if name in known]
            known[instruction.name] = self.result(instruction, computation, operands, arguments)
        last = known.get(computation.root, [])
        for leaf in last:
            self._use(leaf)
        return last

    def result(
        self,
        instruction: Instruction,
        computation: Computation,
        operands: list[list[int]],
        arguments: Sequence[list[int]],
    ) -> list[int]:
        opcode = instruction.opcode
        flat = [leaf for leaves in operands for leaf in leaves]
        if opcode == "parameter":
            return arguments[instruction.number] if instruction.number < len(arguments) else []
        if opcode == "tuple":
            return flat
        if opcode in _SAME and len(flat) >= len(instruction.arrays):
            return flat[: len(instruction.arrays)]
        if opcode == "get-tuple-element":
            whole = computation.instructions[instruction.operands[0]]
            return operands[0][elements(whole)[instruction.number]]
        if opcode in ("while", "conditional", "call"):
            return self._control(instruction, computation, operands)
        leaves = self.fresh(instruction, computation)
        for leaf in flat:
            self._use(leaf, Made(instruction, 0, computation))
        self.order.append(instruction)
        if opcode.endswith("-start"):
            self._start(instruction, operands, leaves)
        elif opcode.endswith("-done"):
            self._done(instruction, computation, operands, leaves)
        elif opcode == "dynamic-update-slice":
            self.join(leaves[0], operands[0][0])
        elif opcode == "custom-call":
            for element, operand in aliased_operands(instruction):
                if operand < len(operands) and operands[operand] and element < len(leaves):
                    self.join(leaves[element], operands[operand][0])
        else:
            self._in_place(instruction, operands, leaves)
        return leaves

    def _control(self, instruction: Instruction, computation: Computation, operands: list[list[int]]) -> list[int]:
        if instruction.opcode == "call":
            return self.run(self.module.computations[instruction.called["to_apply"]], operands)
        if instruction.opcode == "while":
            state = operands[0]
            self.run(self.module.computations[instruction.called["condition"]], [state])
            after = self.run(self.module.computations[instruction.called["body"]], [state])
            for before, new in zip(state, after, strict=True):
                self.join(before, new)
            results = state
        else:
            results = self.fresh(instruction, computation)
            for name, operand in zip(instruction.branches, operands[1:], strict=False):
                for leaf, new in zip(results, self.run(self.module.computations[name], [operand]), strict=False):
                    self.join(leaf, new)
        for leaf in results:
            self._use(leaf, Made(instruction, 0, computation))
        self.order.append(instruction)
        return results

    def _use(self, leaf: int, reader: Made | None = None) -> None:
        buffer = self.buffer(leaf)
        buffer.last = max(buffer.last, 2 * len(self.order) + 1)
        if reader is not None:
            buffer.readers.append(reader)

    def _start(self, instruction: Instruction, operands: list[list[int]], leaves: list[int]) -> None:
        """An asynchronous operation: its result holds its operands too."""
        flat = [leaf for found in operands for leaf in found]
        if instruction.parts is None:
            return
        held = leaves[elements(instruction)[1 if instruction.opcode == "copy-start" else 0]]
        for leaf, operand in zip(held, flat, strict=False):
            self.join(operand, leaf)

    def _done(
        self, instruction: Instruction, computation: Computation, operands: list[list[int]], leaves: list[int]
    ) -> None:
        start = computation.instructions.get(instruction.operands[0]) if instruction.operands else None
        if start is None or start.parts is None or len(start.parts) < 2:
            return
        found = operands[0][elements(start)[0 if instruction.opcode == "copy-done" else 1]]
        for leaf, made in zip(leaves, found, strict=False):
            self.join(made, leaf)

    def _in_place(self, instruction: Instruction, operands: list[list[int]], leaves: list[int]) -> None:
        """Results that are written into operands, or may be."""
        if instruction.opcode == "fusion":
            fused = self.module.computations[instruction.called["calls"]]
            updated, through = updates(fused), _elementwise(fused)
            for index, leaf in enumerate(leaves):
                parameter = updated.get(index)
                if parameter is not None and parameter < len(operands) and operands[parameter]:
                    self.join(operands[parameter][0], leaf)
                    continue
                for number in through.get(index, ()):
                    if number < len(operands) and operands[number]:
                        self._may_share(leaf, operands[number][0], instruction.operands[number])
        elif instruction.opcode not in _NO_SHARING:
            for name, operand in zip(instruction.operands, operands, strict=False):
                if leaves and operand:
                    self._may_share(leaves[0], operand[0], name)

    def _may_share(self, leaf: int, operand: int, name: str) -> None:
        """Note that the result may take the operand's place, if the instruction of that name made it."""
        if name not in [made.instruction.name for made in self.buffer(operand).makers]:
            return
        if self._shapes[leaf] == self._shapes[operand] or self.module.is_of_gpu:
            self._sharing.append((len(self.order) - 1, leaf, operand))

    def share(self) -> None:
        """Let results take the place of operands of the same size that are read for the last time."""
        taken: set[tuple[int, int]] = set()
        for position, leaf, operand in self._sharing:
            new, old = self.buffer(leaf), self.buffer(operand)
            dies = old.last == 2 * position + 1 and new.first == 2 * position
            free = (position, id(old)) not in taken and (position, -id(new)) not in taken
            if old is not new and dies and free and old.is_temporary and old.nbytes == new.nbytes:
                taken |= {(position, id(old)), (position, -id(new))}
                old.last = 2 * position


def updates(fused: Computation) -> dict[int, int]:
    """Which arrays of a fusion's result are a parameter with a slice of it updated: {array: parameter}."""
    found = {}
    for index, root in enumerate(roots(fused)):
        update = _behind(fused, root)
        if update.opcode != "dynamic-update-slice":
            continue
        operand = _behind(fused, fused.instructions[update.operands[0]])
        if operand.opcode == "parameter":
            found[index] = operand.number
    return found


def roots(fused: Computation) -> list[Instruction]:
    """What makes each array of a computation's result."""
    root = fused.instructions[fused.root]
    if root.opcode != "tuple":
        return [root]
    return [fused.instructions[name] for name in root.operands]


def _behind(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _elementwise(fused: Computation) -> dict[int, list[int]]:
    """Which parameters an array of the result depends on element by element alone: {array: parameters}."""
    mixed: set[str] = set()
    for instruction in fused.instructions.values():
        if instruction.opcode in _NO_SHARING and instruction.opcode not in ("reshape", "copy"):
            mixed.update(instruction.operands)
    found: dict[int, list[int]] = {}
    for index, root in enumerate(roots(fused)):
        pending, seen = [root.name], set()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            instruction = fused.instructions[name]
            if instruction.opcode == "parameter" and name not in mixed:
                found.setdefault(index, []).append(instruction.number)
            elif instruction.opcode not in _NO_SHARING:
                pending += instruction.operands
    return found
