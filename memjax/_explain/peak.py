"""The peak of a compiled program: which modules hold what then, and why that is not what the forward pass keeps."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from memjax._core.compat import Frame, user_frames
from memjax._core.program.hlo import Instruction, Module, dtype_name, parse
from memjax._core.program.scopes import Paths, place, scopes
from memjax._explain.kept import collapsed, template
from memjax._explain.live import Buffer, Live, Made, live, roots
from memjax._explain.parts import Alive, Peak, PeakRow, Timeline

_BACKWARD = re.compile(r"\btranspose\(")
_POINTS = 400
_MODULES = 9
_NEAR = 20
_UPDATES = frozenset(("dynamic-update-slice", "scatter"))


def peak_of(module: Module, paths: Paths, residual_bytes: int, temp_bytes: int) -> tuple[Peak, Timeline]:
    """The peak and what leads to it."""
    found = live(module)
    origins = _Origins(module, paths)
    at, held = _fullest(found)
    names = {id(buffer): origins.path(buffer) for buffer in found.buffers}
    kinds = {id(buffer): origins.kind(buffer) for buffer in found.buffers}

    rows: dict[tuple[str, str], list[Buffer]] = {}
    for buffer in held:
        rows.setdefault((template(names[id(buffer)]), kinds[id(buffer)]), []).append(buffer)
    made = [
        PeakRow(collapsed([names[id(buffer)] for buffer in some]), kind, sum(one.nbytes for one in some), len(some))
        for (_, kind), some in rows.items()
    ]
    by_kind: dict[str, int] = {}
    for row in made:
        by_kind[row.kind] = by_kind.get(row.kind, 0) + row.bytes
    kept = sum(buffer.nbytes for buffer in found.buffers if kinds[id(buffer)] == "residual")
    position = min(at // 2, len(found.instructions) - 1)
    peak = Peak(
        bytes=sum(buffer.nbytes for buffer in held),
        temp_bytes=temp_bytes,
        rows=tuple(sorted(made, key=lambda row: -row.bytes)),
        difference=_difference(residual_bytes, kept, by_kind),
        instruction=found.instructions[position].name if found.instructions else "",
    )
    return peak, _timeline(found, names, at)


def alive_at_peak(program: Any, paths: Paths) -> list[Alive]:
    """What is alive at the peak of a compiled program, array by array. The sum is what the compiler reserves.

    Raises:
      ValueError: the compiler does not tell.
    """
    module, memory = parse(program.as_text() or ""), program.memory_analysis()
    if memory is None or not module.is_scheduled:
        raise ValueError(
            "the compiled peak is not known: the backend gives no memory analysis, or no schedule of its program"
        )
    origins = _Origins(module, paths)
    found = [origins.named(buffer) for buffer in _fullest(live(module))[1]]
    besides = memory.temp_size_in_bytes - sum(one.bytes for one in found)
    what = "reserved besides what is alive" if besides >= 0 else "reserved less than what is alive"
    return [*found, Alive(what, "", "", besides)] if besides else found


def _fullest(found: Live) -> tuple[int, list[Buffer]]:
    """The step with the most live bytes, and the buffers that are live at it."""
    change = np.zeros(2 * len(found.instructions) + 2, np.int64)
    for buffer in found.buffers:
        change[buffer.first] += buffer.nbytes
        change[buffer.last] -= buffer.nbytes
    at = int(np.cumsum(change).argmax())
    return at, [buffer for buffer in found.buffers if buffer.first <= at < buffer.last]


def _difference(residual_bytes: int, kept: int, by_kind: dict[str, int]) -> tuple[tuple[str, int], ...]:
    at_peak = by_kind.get("residual", 0)
    steps = [
        ("kept between the passes, as JAX saves it", residual_bytes),
        (
            "saved by the compiler: fused, computed again, or held in a result"
            if kept <= residual_bytes
            else "added by the compiler: copies and conversions that it keeps",
            kept - residual_bytes,
        ),
        ("not alive at the peak", at_peak - kept),
        ("of the forward pass, no residual", by_kind.get("forward", 0)),
        ("of the backward pass: gradients and cotangents", by_kind.get("backward", 0)),
        ("computed again in the backward pass", by_kind.get("recomputed", 0)),
        ("workspace of kernels", by_kind.get("workspace", 0)),
        ("of no pass: optimizer, copies, loop state", by_kind.get("other", 0)),
    ]
    return tuple(step for step in steps if step[1])


class _Origins:
    """Finds the instructions, paths and source lines that buffers come from."""

    def __init__(self, module: Module, paths: Paths):
        self.module, self.paths = module, paths

    def path(self, buffer: Buffer) -> str:
        """The path of the instruction that fills the buffer: in a loop the one that writes into it, not the initial value."""
        writers = [self.writer(made) for made in buffer.makers]
        updates = [self.path_at(writer) for writer in writers if writer is not None]
        plain = [
            self.path_at(made.instruction)
            for made, writer in zip(buffer.makers, writers, strict=True)
            if writer is None
        ]
        found = [path for path in updates if path] or [path for path in plain if path and path != self.paths.name]
        if found:
            return max(found, key=lambda path: path.count("/")) if updates else found[0]
        near = self.near(buffer)
        return next(filter(None, plain), "") if near is None else self.path_at(near)

    def path_at(self, instruction: Instruction) -> str:
        name = instruction.op_name.split(";")[0]
        if not name and not instruction.frame and instruction.opcode == "fusion":
            inner = self.module.computations[instruction.called["calls"]]
            return next(filter(None, (self.path_at(one) for one in reversed(inner.instructions.values()))), "")
        lines = user_frames(self.module.frames.get(instruction.frame, []))
        if not name and not lines:
            return ""
        return self.paths.joined(scopes(name.rpartition("/")[0]), lines)

    def named(self, buffer: Buffer) -> Alive:
        """The buffer, named by the operation that fills it (in a loop, that writes into it) and its place in the user's code."""
        largest = max(buffer.makers, key=lambda made: made.instruction.arrays[made.index].nbytes)
        array = largest.instruction.arrays[largest.index]
        kind = f"{dtype_name(array.dtype)}[{','.join(map(str, array.shape))}]"
        writers = [writer for made in buffer.makers if (writer := self.writer(made)) is not None]
        sources = [*writers, *(made.instruction for made in buffer.makers)]
        source, what = next((one for one in map(self.source, sources) if one.op_name), None), ""
        if source is None and (near := self.near(buffer)) is not None:  # a copy
            source, what = self.source(near), f"{largest.instruction.opcode} of "
        if source is None:
            return Alive(largest.instruction.opcode, "", kind, buffer.nbytes)
        scope, _, operation = source.op_name.split(";")[0].rpartition("/")
        where = place(scope, self.lines(source))
        return Alive(f"{what}{operation} {where}".strip(), where, kind, buffer.nbytes)

    def source(self, instruction: Instruction) -> Instruction:
        """The instruction; of an unnamed fusion, the last named instruction inside, preferably one with source lines."""
        if instruction.op_name or instruction.opcode != "fusion":
            return instruction
        inner = self.module.computations[instruction.called["calls"]].instructions.values()
        named = [one for one in inner if one.op_name]
        return next((one for one in reversed(named) if self.lines(one)), named[-1] if named else instruction)

    def lines(self, instruction: Instruction) -> Sequence[Frame]:
        """The lines of the user's function that the instruction comes from."""
        return self.paths.inside(user_frames(self.module.frames.get(instruction.frame, [])))

    def near(self, buffer: Buffer) -> Instruction | None:
        """The nearest instruction with a path among those that the buffer's makers, then its readers, depend on."""
        for made in (*buffer.makers, *buffer.readers):
            pending, seen = [made.instruction], set[str]()
            while pending and len(seen) < _NEAR:
                instruction = pending.pop(0)
                if instruction.name in seen:
                    continue
                seen.add(instruction.name)
                if self.path_at(instruction):
                    return instruction
                pending += [made.computation.instructions[name] for name in instruction.operands]
        return None

    def writer(self, made: Made) -> Instruction | None:
        """The instruction whose result an in-place update writes; None if the instruction is no such update."""
        instruction, computation = made.instruction, made.computation
        operands: Sequence[str] = ()
        if instruction.opcode == "fusion":
            computation = self.module.computations[instruction.called["calls"]]
            operands = instruction.operands
            outputs = roots(computation)
            instruction = outputs[min(made.index, len(outputs) - 1)]
            while instruction.opcode == "bitcast":
                instruction = computation.instructions[instruction.operands[0]]
        if instruction.opcode not in _UPDATES:
            return None
        position = 1 if instruction.opcode == "dynamic-update-slice" else len(instruction.operands) - 1
        written = computation.instructions[instruction.operands[position]]
        while written.opcode in ("bitcast", "copy") and not written.op_name:
            written = computation.instructions[written.operands[0]]
        if written.opcode == "parameter" and operands:
            return made.computation.instructions[operands[written.number]]
        return written

    def kind(self, buffer: Buffer) -> str:
        if any(_is_workspace(made) for made in buffer.makers):
            return "workspace"
        names = [name for made in buffer.makers if (name := self.op_name(made.instruction))]
        if not names and (near := self.near(buffer)) is not None:
            names = [self.op_name(near)]
        names = [name for name in names if name]
        backward = [bool(_BACKWARD.search(name)) for name in names]
        if any("rematted_computation" in name for name in names) and any(backward):
            return "recomputed"
        if backward and all(backward):
            return "backward"
        if not any("jvp(" in name for name in names):
            return "other"
        read_later = any(_BACKWARD.search(self.op_name(reader.instruction)) for reader in buffer.readers)
        return "residual" if read_later else "forward"

    def op_name(self, instruction: Instruction) -> str:
        if instruction.op_name or instruction.opcode != "fusion":
            return instruction.op_name
        inner = self.module.computations[instruction.called["calls"]]
        return next((one.op_name for one in reversed(inner.instructions.values()) if one.op_name), "")


def _is_workspace(made: Made) -> bool:
    """Whether the buffer is a kernel's workspace: a byte array after its results."""
    arrays = made.instruction.arrays
    array = arrays[made.index]
    is_bytes = array.dtype in ("s8", "u8") and len(array.shape) == 1
    return made.instruction.opcode == "custom-call" and is_bytes and len(arrays) > 1 and made.index == len(arrays) - 1


def _timeline(found: Live, names: dict[int, str], at: int) -> Timeline:
    """Live bytes over the program: a series for each of the modules that hold most at the peak (`at`), and one for all others."""
    steps = 2 * len(found.instructions) + 2
    totals: dict[str, int] = {}
    for buffer in found.buffers:
        if buffer.first <= at < buffer.last:
            name = template(names[id(buffer)])
            totals[name] = totals.get(name, 0) + buffer.nbytes
    largest = sorted(totals, key=lambda name: -totals[name])[:_MODULES]
    series = {name: np.zeros(steps, np.int64) for name in (*largest, "")}
    members: dict[str, list[str]] = {name: [] for name in largest}
    for buffer in found.buffers:
        name = template(names[id(buffer)])
        if name in members:
            members[name].append(names[id(buffer)])
        line = series[name if name in members else ""]
        line[buffer.first] += buffer.nbytes
        line[buffer.last] -= buffer.nbytes
    series = {name: np.cumsum(line)[::2] for name, line in series.items()}
    # The largest moment of each stretch, so that no peak falls between two points.
    whole = np.sum(list(series.values()), axis=0)
    edges = np.unique(np.linspace(0, steps // 2, min(_POINTS, steps // 2) + 1).astype(int))
    points = [int(first + whole[first:end].argmax()) for first, end in itertools.pairwise(edges)]
    return Timeline(
        modules=(*(collapsed(members[name]) for name in largest), "other"),
        instructions=tuple(points),
        bytes=tuple(tuple(int(series[name][point]) for point in points) for name in (*largest, "")),
        backward=_start_of_backward(found),
    )


def _start_of_backward(found: Live) -> int:
    """The index that best separates the two passes: the scheduler puts a few instructions of each on the other side."""
    later = np.cumsum([1 if _BACKWARD.search(one.op_name) else -("jvp(" in one.op_name) for one in found.instructions])
    return int(later.argmin()) + 1 if len(later) else 0
