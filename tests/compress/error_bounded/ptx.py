"""PTX in numpy: what the kernels' instructions do to words, said from the PTX manual, for machines without a GPU."""

import re

import numpy as np


def run(code: str, constraints: str, *args, dtype=np.int32) -> np.ndarray:
    """In place of `_warp._asm`: instructions without predicates on registers of 32 bits, each operand an array."""
    registers: dict[str, np.ndarray] = {}
    for number, arg in enumerate(np.broadcast_arrays(*map(np.asarray, args)), 1):
        registers[f"${number}"] = np.ascontiguousarray(arg).view(np.uint32)

    def operand(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.uint32(int(name[2:], 16))
        return np.uint32(int(name, 0)) if name[0].isdigit() else registers[name]

    assert constraints.count(",") == len(args), (constraints, len(args))
    for statement in filter(None, (part.strip() for part in code.strip("{ }").split(";"))):
        name, *operands = re.split(r"[ ,]+", statement)
        if name != ".reg":
            with np.errstate(all="ignore"):
                registers[operands[0]] = _instruction(name, *map(operand, operands[1:]))
    shape = np.broadcast_shapes(*map(np.shape, args))
    result = np.array(np.broadcast_to(registers["$0"], shape))
    return result.view(np.float32) if dtype == np.float32 else result


def _instruction(name: str, *args):
    kind, *options = name.split(".")
    if kind == "mov":
        return args[0]
    if kind == "lop3":
        *abc, table = args
        return sum((_minterm(abc, i) for i in range(8) if int(table) >> i & 1), np.uint32(0))
    if kind == "prmt":
        bytes_ = [(word >> np.uint32(8 * i)) & np.uint32(0xFF) for word in args[:2] for i in range(4)]
        picks = [(args[2] >> np.uint32(4 * i)) & np.uint32(0xF) for i in range(4)]
        return sum(np.choose(pick, bytes_).astype(np.uint32) << np.uint32(8 * i) for i, pick in enumerate(picks))
    if kind == "cvt":
        assert options in (["rz", "relu", "bf16x2", "f32"], ["rz", "bf16x2", "f32"]), name
        high, low = (np.where(x >> np.uint32(31), np.uint32(0), x) if "relu" in options else x for x in args)
        return (high & np.uint32(0xFFFF0000)) | (low >> np.uint32(16))
    if "bf16x2" in options:
        halves = [_bfloat16_pair([x << np.uint32(16), x & np.uint32(0xFFFF0000)][i] for x in args) for i in range(2)]
        low, high = (_rounded_to_bfloat16(_float(kind, options, *half)) for half in halves)
        return (low >> np.uint32(16)) | high
    assert "f32" in options, name
    floats = [np.asarray(x).view(np.float32).astype(np.float64) for x in args]
    if options[0] == "rp":
        assert kind == "fma", name
        return _rounded_up(floats[0] * floats[1], floats[2]).view(np.uint32)
    return np.asarray(_float(kind, options, *floats), np.float32).view(np.uint32)


def _minterm(abc, i: int):
    """Bits where a, b, c are those of i, the first the highest."""
    a, b, c = (x if i >> (2 - place) & 1 else ~x for place, x in enumerate(abc))
    return a & b & c


def _bfloat16_pair(words):
    return [np.asarray(word, np.uint32).view(np.float32).astype(np.float64) for word in words]


def _float(kind: str, options: list[str], *x):
    """Exact, or in float64, which is exact enough: what is rounded is never near a tie that is not one."""
    assert options[0] in ("rn", "bf16x2"), options
    operations = {
        "fma": lambda a, b, c: a * b + c,
        "max": lambda a, b: np.fmax(a, b),
    }
    return operations[kind](*x)


def _rounded_up(a, b):
    """a + b as a float32."""
    total = a + b
    rest = (a - (total - (total - a))) + (b - (total - a))  # what float64 lost
    rounded = total.astype(np.float32)
    is_below = (rounded < total) | ((rounded == total) & (rest > 0))
    return np.where(is_below, np.nextafter(rounded, np.float32(np.inf)), rounded)


def _rounded_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """To nearest, halves to even ones; the bits, as those of a float32."""
    exponent = np.maximum(
        np.frexp(np.where(np.isfinite(x) & (x != 0), x, 1))[1], -125
    )  # of subnormal numbers the least
    step = np.exp2(exponent - 8.0)
    rounded = np.where(np.isfinite(x), np.rint(x / step) * step, x)
    return rounded.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
