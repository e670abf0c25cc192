"""The text of a compiled program (`compiled.as_text()`) as data: computations, instructions, shapes, where each comes from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from memjax._core.compat import Frame

_KINDS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_TABLE_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_FIELD = re.compile(r"(\w+)=(\d+)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


@dataclass(frozen=True)
class Array:
    """The type of one array, its bytes, and whether it lies in host memory."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    on_host: bool = False


@dataclass(eq=False)
class Instruction:
    """One instruction.

    Attributes:
      name, opcode: as in the text.
      arrays: the arrays of its result, tuples flattened.
      parts: how many of them each element of a tuple has; None if the result is no tuple.
      operands: names of instructions of the same computation.
      called: computations, by the attribute that names them ("body", "calls").
      branches: computations of a conditional.
      op_name: JAX's name of the operation, "jit(f)/jvp(block)/dot_general".
      frame: number of its line in the program's table of stack frames; 0 for none.
      number: of a parameter, or of a tuple's element.
      text: attributes.
    """

    name: str
    opcode: str
    arrays: list[Array]
    parts: list[int] | None
    operands: list[str]
    called: dict[str, str]
    branches: list[str]
    op_name: str
    frame: int
    number: int
    text: str


@dataclass(eq=False)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""


@dataclass(eq=False)
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: the name of the first.
      is_scheduled: whether instructions are in the order in which they run.
      is_of_gpu: whether a GPU's compiler wrote it.
      frames: for each number of a stack frame its lines, the outermost first.
    """

    computations: dict[str, Computation]
    entry: str
    is_scheduled: bool
    is_of_gpu: bool
    frames: dict[int, list[Frame]]


def parse(text: str) -> Module:
    """Read the text. Unknown parts are skipped."""
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str | dict[str, int]]] = {}
    entry, table = "", ""
    current: Computation | None = None
    lines = text.splitlines()
    for line in lines:
        if current is None:
            if match := _COMPUTATION.match(line):
                current = computations.setdefault(match[2], Computation(match[2]))
                entry = match[2] if match[1] else entry
            elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = line
            elif match := _TABLE_ROW.match(line):
                row: str | dict[str, int] = {name: int(number) for name, number in _FIELD.findall(match[3] or "")}
                tables.setdefault(table, {})[int(match[1])] = match[2] if match[2] is not None else row
        elif line.startswith("}"):
            current = None
        elif match := _HEAD.match(line):
            instruction = _instruction(match[2], _COMMENT.sub("", line[match.end() :]))
            current.instructions[instruction.name] = instruction
            current.root = instruction.name if match[1] else current.root
    for computation in computations.values():
        computation.root = computation.root or next(reversed(computation.instructions), "")
    is_scheduled = "is_scheduled=true" in (lines[0] if lines else "")
    return Module(computations, entry, is_scheduled, '"operation_queue_id"' in text, _frames(tables))


def dtype_name(dtype: str) -> str:
    """What JAX calls a dtype of the text: "float32" for "f32"."""
    kind, bits, rest = re.fullmatch(r"([a-z]+)(\d*)(.*)", dtype).groups()  # type: ignore[union-attr]
    if rest:  # f8e4m3fn
        return f"float{bits}_{rest}"
    return "bool" if dtype == "pred" else f"{_KINDS.get(kind, kind)}{bits}"


def elements(instruction: Instruction) -> list[slice]:
    """Which of the flattened arrays belong to each element of a tuple."""
    found, start = [], 0
    for count in instruction.parts or [len(instruction.arrays)]:
        found.append(slice(start, start + count))
        start += count
    return found


def aliased_operands(instruction: Instruction) -> list[tuple[int, int]]:
    """Which element of a custom call's result is in which operand's place."""
    _, _, aliasing = instruction.text.partition("output_to_operand_aliasing={")
    found = []
    for out, operand, _ in _ALIAS.findall(aliasing):
        found.append((int(out.split(",")[0]) if out.strip() else 0, int(operand)))
    return found


def _instruction(name: str, rest: str) -> Instruction:
    type_text, rest = _split_type(rest)
    opcode, _, rest = rest.partition("(")
    inner, attributes = _split_closing(rest)
    arrays = [_array(*match) for match in _ARRAY.findall(type_text)]
    branches = [branch for names in _CALLED_LISTS.findall(attributes) for branch in re.findall(r"[\w.\-]+", names)]
    called = dict(_CALLED.findall(attributes))
    branches += [called.pop(key) for key in ("true_computation", "false_computation") if key in called]
    op_name, frame, index = _OP_NAME.search(attributes), _FRAME.search(attributes), _INDEX.search(attributes)
    number = int(inner) if opcode == "parameter" else int(index[1]) if index else 0
    return Instruction(
        name=name,
        opcode=opcode,
        arrays=arrays,
        parts=_parts(type_text) if type_text.startswith("(") else None,
        operands=[] if opcode in ("parameter", "constant") else _NAME.findall(inner),
        called=called,
        branches=branches,
        op_name=op_name[1] if op_name else "",
        frame=int(frame[1]) if frame else 0,
        number=number,
        text=attributes,
    )


def _split_type(text: str) -> tuple[str, str]:
    """The type at the start of `text`, which may be a tuple, and what follows."""
    if not text.startswith("("):
        before, _, after = text.partition(" ")
        return before, after
    inner, after = _split_closing(text[1:])
    return f"({inner})", after.lstrip()


def _split_closing(text: str) -> tuple[str, str]:
    """What is inside a parenthesis that was opened before, and what follows it. Texts in quotes are skipped."""
    depth, quoted, index = 1, False, 0
    while index < len(text):
        letter = text[index]
        if letter == '"' and (index == 0 or text[index - 1] != "\\"):
            quoted = not quoted
        elif not quoted and letter in "()":
            depth += 1 if letter == "(" else -1
            if depth == 0:
                return text[:index], text[index + 1 :]
        index += 1
    return text, ""


def _parts(type_text: str) -> list[int]:
    """How many arrays each element of a tuple type has."""
    parts, depth, start = [], 0, 1
    for index, letter in enumerate(type_text):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (depth == 0 and index == len(type_text) - 1):
            piece = type_text[start:index]
            if piece.strip():
                parts.append(len(_ARRAY.findall(piece)))
            start = index + 1
    return parts


def _array(dtype: str, sizes: str, layout: str) -> Array:
    shape = tuple(int(size.lstrip("<= ")) for size in sizes.split(",") if size.strip())
    bits = _BITS.get(dtype)
    if bits is None:
        digits = re.match(r"[a-z]+(\d+)", dtype)
        bits = int(digits[1]) if digits else 0
    if "E(" in layout:  # the layout's own element size: packed 4-bit integers
        size = re.search(r"E\((\d+)\)", layout)
        bits = int(size[1]) if size else bits
    elif bits < 8 and bits:
        bits = 8
    return Array(dtype, shape, math.prod(shape) * bits // 8, "S(5)" in layout)


def _frames(tables: dict[str, dict]) -> dict[int, list[Frame]]:
    names, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    places, stack = tables.get("FileLocations", {}), tables.get("StackFrames", {})
    # A frame without a parent names itself where numbers of parents begin at 1, and 0, or nothing, elsewhere.
    offset = 1 if stack.get(1, {}).get("parent_frame_id") == 1 else 0
    found: dict[int, list[Frame]] = {0: []}
    for number, row in stack.items():  # a parent comes before its children
        place = places.get(row.get("file_location_id", 0), {})
        frame = Frame(
            names.get(place.get("file_name_id", 0), ""),
            place.get("line", 0),
            functions.get(place.get("function_name_id", 0), ""),
        )
        found[number] = [*found.get(row.get("parent_frame_id", 0) - offset, []), frame]
    return found
