"""Operations of a warp of 32 threads for the kernels: an instruction or two on a GPU, and `jax.numpy` in interpreted kernels.

Thread l holds the elements at index l of the last axis of every array.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from memjax._core.barriers import barrier
from memjax.compress._codecs.bits import Words, shift_left, shift_right, u32
from memjax.compress._codecs.kernels import instruction as _asm
from memjax.compress._error_bounded.quantize import LEAST, middle, parts_of_steps
from memjax.compress._error_bounded.tiles import LANES

Lane = UInt32[Array, "*more 32"]
Pair = tuple[Int32[Array, "..."], Int32[Array, "..."]]  # one for each column of a lane

# The bits of the float32 2^23, from which on floats have no fraction: their low bits are an integer.
INTEGER = 0x4B000000


@dataclasses.dataclass(frozen=True)
class Warp:
    """The operations of a warp; if `native`, in PTX."""

    native: bool

    def fetch_add(self, ref, x: Int32[Array, "32"]) -> Int32[Array, "32"]:
        """Atomically `ref[0] += x`, where all threads have the same x; returns the value before to all threads."""
        if self.native:
            from memjax.compress._error_bounded import kernel_memory

            before = kernel_memory.fetch_add(ref, x, jnp.arange(LANES, dtype=jnp.int32) == 0)
            return _asm("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", before).astype(jnp.int32)
        before = ref[0]
        ref[0] = before + jnp.max(x)
        return jnp.broadcast_to(before, (LANES,))

    def opaque(self, x: Int32[Array, ""]) -> Int32[Array, ""]:
        """Returns `x`; if `native`, hides its value from the compiler.

        If the compiler could prove that x is a multiple of something, it would vectorise loads and then shuffle values between
        threads.
        """
        return (
            jnp.max(_asm("mov.b32 $0, $1;", "=r,r", jnp.broadcast_to(x, (LANES,))).astype(jnp.int32))
            if self.native
            else x
        )

    def before(self, flags: Bool[Array, "*more 32"]) -> tuple[Lane, Lane]:
        """Counts set flags: for each thread those of the threads before it, and those of all threads."""
        if not self.native:
            count = jnp.cumsum(u32(flags), -1, dtype=jnp.uint32)
            return count - u32(flags), jnp.broadcast_to(count[..., -1:], count.shape)
        ballot = _asm(
            "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "=r,r", u32(flags)
        )
        before = _asm("{ .reg .b32 t; mov.u32 t, %lanemask_lt; and.b32 t, t, $1; popc.b32 $0, t; }", "=r,r", ballot)
        return before, self.ones(ballot)

    def nothing(self, word: Words) -> Lane:
        """Zero in a form that compilers do not simplify."""
        return _asm("{ .reg .b32 t; clz.b32 t, $1; shr.u32 $0, t, 6; }", "=r,r", word) if self.native else word & u32(0)

    def bytes_of(self, words: Sequence[Words], which: tuple[int, int, int, int]) -> Lane:
        """Selects four bytes of two words, the lowest first: 0 to 3 are bytes of the first word, 4 to 7 those of the second."""
        low, high = words
        if self.native:
            selector = sum(byte << (4 * i) for i, byte in enumerate(which))
            return _asm(f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", low, high)
        # Bytes that come from the same word and move as far share a mask.
        masks: collections.Counter[tuple[int, int]] = collections.Counter()
        for i, byte in enumerate(which):
            masks[byte // 4, i - byte % 4] += 0xFF << (8 * i)
        parts = []
        for (word, up), mask in masks.items():
            moved = words[word] << (8 * up) if up > 0 else words[word] >> (-8 * up)
            parts.append(moved & u32(mask))
        return functools.reduce(jnp.bitwise_or, parts)

    def shift_left(self, word: Words, by: Words) -> Lane:
        """`word << by`, which is zero for 32 and more."""
        return _asm("shl.b32 $0, $1, $2;", "=r,r,r", word, by) if self.native else shift_left(word, by)

    def shift_right(self, word: Words, by: Words) -> Lane:
        """`word >> by`, which is zero for 32 and more."""
        return _asm("shr.b32 $0, $1, $2;", "=r,r,r", word, by) if self.native else shift_right(word, by)

    def ones(self, word: Words) -> Lane:
        """The number of bits that are set."""
        return _asm("popc.b32 $0, $1;", "=r,r", word) if self.native else lax.population_count(word)

    def total(self, x: Lane) -> Lane:
        """The sum over all threads, in each."""
        if not self.native:
            return jnp.broadcast_to(jnp.sum(x, -1, dtype=jnp.uint32, keepdims=True), x.shape)
        return _asm("redux.sync.add.u32 $0, $1, 0xffffffff;", "=r,r", x)

    def parts(self, magnitude: Words, exponent: Int32[Array, "..."], inverse: Float[Array, "..."]) -> Lane:
        """`INTEGER` + c of `parts_of_steps`. If c is 2^23 or more, or x not finite, the result has higher bits, too.

        Args:
          magnitude: the bits of |x| as a float32.
          exponent: k of a part, 2^k.
          inverse: 2^-k.
        """
        if not self.native:
            count, too_large = parts_of_steps(magnitude, exponent)
            # For each plane XLA would compute all numbers again, and take half as long again to compile.
            return barrier(u32(INTEGER) + jnp.where(too_large, u32(2**23), count))
        # A float from 2^23 on has no fraction.
        x = lax.bitcast_convert_type(magnitude, jnp.float32)
        asm = "fma.rp.f32 $0, $1, $2, 0f4B000000;"
        count = _asm(asm, "=f,f,f", x, jnp.broadcast_to(inverse, x.shape), dtype=jnp.float32)
        return lax.bitcast_convert_type(count, jnp.uint32)

    def choose(self, mask: int, a: Words, b: Words) -> Lane:
        """The bits of `a` where those of `mask` are set, elsewhere those of `b`."""
        if self.native:
            return _asm(f"lop3.b32 $0, $1, $2, {mask:#x}, 0xE4;", "=r,r,r", a, b)
        return b ^ ((a ^ b) & u32(mask))

    def float_of_byte(self, word: Words, index: Words) -> Float[Array, "*more 32"]:
        """2^23 + a byte of the word, as a float."""
        if self.native:
            args = _alike(word, u32(0x5440) + index)
            return _asm("prmt.b32 $0, $1, 0x4B00, $2;", "=f,r,r", *args, dtype=jnp.float32)
        return lax.bitcast_convert_type(((word >> (u32(8) * index)) & u32(0xFF)) | u32(INTEGER), jnp.float32)

    def float_of_half(self, word: Words, half: int) -> Float[Array, "*more 32"]:
        """2^23 + a half of the word, as a float."""
        if self.native:
            code = f"prmt.b32 $0, $1, 0x4B00, {(0x5410, 0x5432)[half]:#x};"
            return _asm(code, "=f,r", word, dtype=jnp.float32)
        return lax.bitcast_convert_type((word >> (16 * half)) & u32(0xFFFF) | u32(INTEGER), jnp.float32)

    def bfloat16_values_of_halves(self, word: Words, steps: Sequence[Lane], keeps_signs: bool) -> Lane:
        """`middle` times a step, as a bfloat16 whose lower bits are cut off, for the numbers in both halves of a word. With signs
        a number is 4 or more, or 0, which gives 0.

        Args:
          steps: the steps of both values, float32.
        """
        if self.native:
            unit, zero, first, second, convert = 0.125, 4, "0x4B00, 0x5410", "0x4B00, 0x5432", "cvt.rz.bf16x2.f32"
            if keeps_signs:
                # 2^23 + 1, and 256 times the number, that is 2^-8 more than the number, which goes with the bits beyond.
                unit, zero, first, second = 2.0**-11, 1024, "0x4B01, 0x5104", "0x4B01, 0x5324"
                convert = "cvt.rz.relu.bf16x2.f32"
            sizes = [x * jnp.float32(unit) for x in steps]
            shifts = (size * -(2.0**23 + zero) for size in sizes)
            asm = (
                f"{{ .reg .f32 x, y; prmt.b32 x, $1, {first}; prmt.b32 y, $1, {second}; fma.rn.f32 x, x, $2, $4;"
                f" fma.rn.f32 y, y, $3, $5; {convert} $0, y, x; }}"
            )
            return _asm(asm, "=r,r,f,f,f,f", word, *(jnp.broadcast_to(x, word.shape) for x in (*sizes, *shifts)))
        values = []
        for number, step in zip((word & u32(0xFFFF), word >> 16), steps, strict=True):
            value = middle(number, jnp.bfloat16, keeps_signs=keeps_signs) * step
            value = lax.bitcast_convert_type(value, jnp.uint32)
            values.append(jnp.where(number == 0, u32(0), value) if keeps_signs else value)
        return (values[0] >> 16) | (values[1] & u32(0xFFFF0000))

    def bfloat16_values(self, word: Words, first: Words, scales: Sequence[Lane]) -> Lane:
        """max(x a + b, x c + d), or without c and d x a + b, where x is 16 and an eighth of what bytes `first` and `first` + 2
        are above 128: two bfloat16s. Native only.

        Args:
          scales: a, b, and perhaps c, d, each two bfloat16s: `scales_of_bfloat16_values`.
        """
        # Such a byte beside 0x41 is the bfloat16 x.
        args = _alike(word, u32(0x4240) + u32(0x101) * first, *scales)
        if len(scales) == 2:
            asm = "{ .reg .b32 x; prmt.b32 x, $1, 0x41414141, $2; fma.rn.bf16x2 $0, x, $3, $4; }"
            return _asm(asm, "=r,r,r,r,r", *args)
        return _asm(
            "{ .reg .b32 x, y; prmt.b32 x, $1, 0x41414141, $2; fma.rn.bf16x2 y, x, $5, $6;"
            " fma.rn.bf16x2 x, x, $3, $4; max.bf16x2 $0, x, y; }",
            "=r,r,r,r,r,r,r",
            *args,
        )


def _alike(*args: Words) -> list[Words]:
    shape = jnp.broadcast_shapes(*(x.shape for x in args))
    return [jnp.broadcast_to(x, shape) for x in args]


def scales_of_bfloat16_values(steps: Sequence[Float[Array, "..."]], keeps_signs: bool) -> list[Words]:
    """The scales for which `Warp.bfloat16_values` is `middle` times a step. With signs numbers have to be 0, or 4 or more."""
    scales = (1, -16.5, 2 * LEAST, -32 * LEAST) if keeps_signs else (1, -16.5)
    found = []
    for s in scales:
        scaled = [x * jnp.float32(s) for x in steps]
        low, high = (lax.bitcast_convert_type(x, jnp.uint32) for x in scaled)
        found.append((low >> 16) | (high & u32(0xFFFF0000)))
    return found
