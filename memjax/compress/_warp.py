"""What the kernels ask of a warp of 32 threads: on a GPU an instruction or two each, and in interpreted kernels the same
in `jax.numpy`.

Thread l holds what is at index l of the last axis of every array.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from memjax.compress._bits import Words, shift_left, shift_right, u32
from memjax.compress._quantize import whole_eighths
from memjax.compress._tiles import LANES

Lane = UInt32[Array, "*more 32"]
Pair = tuple[Int32[Array, "..."], Int32[Array, "..."]]  # one for each column of a lane

# The bits of the float32 2^23, from which on floats have no fraction: their low bits are an integer.
INTEGER = 0x4B000000


@dataclasses.dataclass(frozen=True)
class Warp:
    """`native`: by PTX."""

    native: bool

    def fetch_add(self, ref, x: Int32[Array, "32"]) -> Int32[Array, "32"]:
        """`ref[0] += x`, of which all threads have the same, at once; the value before, in all threads."""
        if self.native:
            from memjax.compress import _pair_memory

            before = _pair_memory.fetch_add(ref, x, jnp.arange(LANES, dtype=jnp.int32) == 0)
            return _asm("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", before).astype(jnp.int32)
        before = ref[0]
        ref[0] = before + jnp.max(x)
        return jnp.broadcast_to(before, (LANES,))

    def opaque(self, x: Int32[Array, ""]) -> Int32[Array, ""]:
        """`x`, of which compilers know nothing. If they knew that it is a multiple of something, they would give threads
        neighbouring values to load at once, and move them to where they belong afterwards.
        """
        return (
            jnp.max(_asm("mov.b32 $0, $1;", "=r,r", jnp.broadcast_to(x, (LANES,))).astype(jnp.int32))
            if self.native
            else x
        )

    def before(self, flags: Bool[Array, "*more 32"]) -> tuple[Lane, Lane]:
        """In how many threads before each, and in how many in all, a flag is set."""
        if not self.native:
            count = jnp.cumsum(u32(flags), -1, dtype=jnp.uint32)
            return count - u32(flags), jnp.broadcast_to(count[..., -1:], count.shape)
        ballot = _asm(
            "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "=r,r", u32(flags)
        )
        before = _asm("{ .reg .b32 t; mov.u32 t, %lanemask_lt; and.b32 t, t, $1; popc.b32 $0, t; }", "=r,r", ballot)
        return before, self.ones(ballot)

    def nothing(self, word: Words) -> Lane:
        """Zero, which compilers do not see."""
        return _asm("{ .reg .b32 t; clz.b32 t, $1; shr.u32 $0, t, 6; }", "=r,r", word) if self.native else word & u32(0)

    def bytes_of(self, words: Sequence[Words], which: tuple[int, int, int, int]) -> Lane:
        """A word of bytes, the lowest first; bytes 0 to 3 are those of the first of two words, 4 to 7 those of the second."""
        low, high = words
        if self.native:
            selector = sum(byte << (4 * i) for i, byte in enumerate(which))
            return _asm(f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", low, high)
        bytes_ = (
            (high if byte >= 4 else low) >> (8 * (byte % 4)) << 24 >> (24 - 8 * i) for i, byte in enumerate(which)
        )
        return functools.reduce(jnp.bitwise_or, bytes_)

    def shift_left(self, word: Words, by: Words) -> Lane:
        """Zero for 32 and more."""
        return _asm("shl.b32 $0, $1, $2;", "=r,r,r", word, by) if self.native else shift_left(word, by)

    def shift_right(self, word: Words, by: Words) -> Lane:
        """Zero for 32 and more."""
        return _asm("shr.b32 $0, $1, $2;", "=r,r,r", word, by) if self.native else shift_right(word, by)

    def ones(self, word: Words) -> Lane:
        """How many bits are set."""
        return _asm("popc.b32 $0, $1;", "=r,r", word) if self.native else lax.population_count(word)

    def total(self, x: Lane) -> Lane:
        """The sum over all threads, in each."""
        if not self.native:
            return jnp.broadcast_to(jnp.sum(x, -1, dtype=jnp.uint32, keepdims=True), x.shape)
        return _asm("redux.sync.add.u32 $0, $1, 0xffffffff;", "=r,r", x)

    def eighths(self, wide: Words, exponent: Int32[Array, "..."], inverse: Float[Array, "..."], dtype) -> Lane:
        """`INTEGER` + c of `whole_eighths`; if c is 2^23 or more, or x not finite, anything from `INTEGER` + 2^23 on.

        Args:
          wide: the bits of x as a float32.
          inverse: of an eighth of a step.
          dtype: of x.
        """
        if not self.native:
            count, too_large = whole_eighths(wide & u32(0x7FFFFFFF), exponent, dtype)
            return u32(INTEGER) + jnp.where(too_large, u32(2**23), count)
        # A float from 2^23 on has no fraction: 2^23 - 1/2 + t, rounded to nearest, is 2^23 + c. The product is exact where it
        # matters.
        rounded = "add.rn.f32 n, t, 0f4AFFFFFF; max.NaN.f32 n, n, 0f4B000000;"
        if dtype == jnp.bfloat16:  # quarters first, as of pairs
            rounded = (
                f"mul.rn.f32 t, t, 0f3F000000; {rounded} sub.rn.f32 n, n, 0f4B000000; sub.rn.f32 t, t, n;"
                " set.gt.f32.f32 t, t, 0f3F000000; fma.rn.f32 n, n, 0f40000000, t; add.rn.f32 n, n, 0f4B000000;"
            )
        asm = f"{{ .reg .f32 t, n; abs.f32 t, $1; mul.rn.f32 t, t, $2; {rounded} mov.f32 $0, n; }}"
        x = lax.bitcast_convert_type(wide, jnp.float32)
        count = _asm(asm, "=f,f,f", x, jnp.broadcast_to(inverse, x.shape), dtype=jnp.float32)
        return lax.bitcast_convert_type(count, jnp.uint32)

    def bfloat16_quarters(self, pair: Words, exponents: Pair, inverse: Lane) -> Lane:
        """For two bfloat16s in a word: 0x4300 + c / 2 of `whole_eighths`, and if that is 128 or more, or x not finite, anything
        that has bits beyond those of 0x437F.

        Args:
          inverse: of a quarter of a step, of both, two bfloat16s.
        """
        if self.native:
            # As above, with 128 for 2^23.
            asm = (
                "{ .reg .b32 t, shift, least; mov.b32 shift, 0x42FF42FF; mov.b32 least, 0x43004300; abs.bf16x2 t, $1;"
                " mul.rn.bf16x2 t, t, $2; add.rn.bf16x2 t, t, shift; max.NaN.bf16x2 $0, t, least; }"
            )
            return _asm(asm, "=r,r,r", pair, jnp.broadcast_to(inverse, pair.shape))
        halves = []
        for wide, exponent in zip((pair << 16, pair & u32(0xFFFF0000)), exponents, strict=True):
            count, too_large = whole_eighths(wide & u32(0x7FFFFFFF), exponent, jnp.bfloat16)
            halves.append(jnp.where(too_large | (count > u32(255)), u32(0xFFFF), u32(0x4300) + (count >> 1)))
        return halves[0] | (halves[1] << 16)

    def bfloat16_odds(self, pairs: Sequence[Words], quarters: Sequence[Words], exponents: Pair, inverse: Lane) -> Lane:
        """Of four words of two bfloat16s, which c are odd, where they are below 256: bits as of `bfloat16_flags`."""
        if self.native:
            # Whether more than half a quarter is left.
            steps = (
                f" abs.bf16x2 t, ${i}; mul.rn.bf16x2 t, t, $9; sub.rn.bf16x2 c, ${i + 4}, base; sub.rn.bf16x2 t, t, c;"
                " set.gt.bf16x2.bf16x2 t, t, half; fma.rn.bf16x2 x, x, two, t;"
                for i in (4, 3, 2, 1)
            )
            asm = (
                "{ .reg .b32 x, t, c, base, half, two; mov.b32 base, 0x43004300; mov.b32 half, 0x3F003F00;"
                f" mov.b32 two, 0x40004000; mov.b32 x, 0x41004100;{''.join(steps)} mov.b32 $0, x; }}"
            )
            return _asm(asm, "=r" + 9 * ",r", *pairs, *quarters, jnp.broadcast_to(inverse, pairs[0].shape))
        odds = u32(0)
        for i, pair in enumerate(pairs):
            for place, wide, k in zip((i, 16 + i), (pair << 16, pair & u32(0xFFFF0000)), exponents, strict=True):
                odds |= (whole_eighths(wide & u32(0x7FFFFFFF), k, jnp.bfloat16)[0] & u32(1)) << place
        return odds

    def flags(self, values: Sequence[Sequence[Words]]) -> Lane:
        """Which of some float32s are not zero: bits 0, 1, ... and, of the second list, 8, 9, ... Of NaNs it says anything."""
        places = [8 * i + j for i, row in enumerate(values) for j in range(len(row))]
        all_values = [x for row in values for x in row]
        if not self.native:
            return functools.reduce(
                jnp.bitwise_or, (u32(x & u32(0x7FFFFFFF) != 0) << i for i, x in zip(places, all_values, strict=True))
            )
        # Even the least float times 2^150 is more than one; from 2^23 on a float's low bits are an integer.
        steps = (
            f" abs.f32 f, ${i}; mul.rn.sat.f32 f, f, 0f7F000000; mul.rn.sat.f32 f, f, 0f4B000000;"
            f" fma.rn.f32 sum, f, 0f{(127 + place) << 23:08X}, sum;"
            for i, place in enumerate(places, 1)
        )
        asm = f"{{ .reg .f32 f, sum; mov.f32 sum, 0f4B000000;{''.join(steps)} mov.b32 $0, sum; }}"
        floats = (lax.bitcast_convert_type(x, jnp.float32) for x in all_values)
        return _asm(asm, "=r" + len(places) * ",f", *floats)

    def bfloat16_flags(self, pairs: Sequence[Words]) -> Lane:
        """Of four words of two bfloat16s, which are not zero: bits 0 to 3 and 16 to 19; others of the upper bytes are set."""
        if self.native:
            # Multiplied by 16, 8 has no bits there.
            steps = (f" set.neu.bf16x2.bf16x2 f, ${i}, zero; fma.rn.bf16x2 x, x, two, f;" for i in (4, 3, 2, 1))
            asm = (
                "{ .reg .b32 x, f, zero, two; mov.b32 zero, 0; mov.b32 two, 0x40004000; mov.b32 x, 0x41004100;"
                f"{''.join(steps)} mov.b32 $0, x; }}"
            )
            return _asm(asm, "=r,r,r,r,r", *pairs)
        low, high = u32(0x7FFF), u32(0x7FFF0000)
        flags = (u32(x & low != 0) | (u32(x & high != 0) << 16) for x in pairs)
        return functools.reduce(jnp.bitwise_or, (flag << i for i, flag in enumerate(flags)))

    def choose(self, mask: int, a: Words, b: Words) -> Lane:
        """Bits of `a` where those of `mask` are set, elsewhere those of `b`."""
        if self.native:
            return _asm(f"lop3.b32 $0, $1, $2, {mask:#x}, 0xE4;", "=r,r,r", a, b)
        return b ^ ((a ^ b) & u32(mask))

    def float_of_byte(self, word: Words, index: Words) -> Float[Array, "*more 32"]:
        """2^20, and an eighth of a word's byte."""
        if self.native:
            shape = jnp.broadcast_shapes(word.shape, index.shape)
            args = (jnp.broadcast_to(x, shape) for x in (word, u32(0x5460) + index))
            return _asm("prmt.b32 $0, $1, 0x4980, $2;", "=f,r,r", *args, dtype=jnp.float32)
        return lax.bitcast_convert_type(((word >> (u32(8) * index)) & u32(0xFF)) | u32(0x49800000), jnp.float32)

    def bfloat16_values(self, word: Words, first: Words, scale: Lane, low_scale: Lane, shift: Lane, low_shift: Lane):
        """max(x * scale + shift, x * low_scale + low_shift, 0), where x is 16 and an eighth of what bytes `first` and
        `first` + 2 are above 128: two bfloat16s. Native only.

        The others hold two bfloat16s. Such a byte beside 0x41 is the bfloat16 x.
        """
        return _asm(
            "{ .reg .b32 x, low; prmt.b32 x, $1, 0x41414141, $2; fma.rn.relu.bf16x2 low, x, $4, $6;"
            " fma.rn.bf16x2 x, x, $3, $5; max.bf16x2 $0, x, low; }",
            "=r,r,r,r,r,r,r",
            *_alike(word, _pair_of_bytes(first), scale, low_scale, shift, low_shift),
        )

    def bfloat16_values_of_two(self, word: Words, odd: Words, first: Words, scales: tuple[Lane, ...]):
        """max(x a + b, x c + d, 0), where x is an eighth of a number: half of it is what bytes `first` and `first` + 2 of
        `word` are above 128, the rest what these bytes of `odd` are. Native only.

        Args:
          scales: 2 a, a / 8, b, 2 c, c / 8, d, each two bfloat16s.
        """
        # 8, of a byte beside 0x41, and 16, of one beside 0x43, make up for each other.
        return _asm(
            "{ .reg .b32 x, y, low, shift; mov.b32 shift, 0xC1C0C1C0; prmt.b32 x, $1, 0x41414141, $3;"
            " prmt.b32 y, $2, 0x43434343, $3; add.rn.bf16x2 x, x, shift; fma.rn.bf16x2 low, x, $7, $9;"
            " fma.rn.relu.bf16x2 low, y, $8, low; fma.rn.bf16x2 x, x, $4, $6; fma.rn.bf16x2 x, y, $5, x;"
            " max.bf16x2 $0, x, low; }",
            "=r" + 9 * ",r",
            *_alike(word, odd, _pair_of_bytes(first), *scales),
        )


def _pair_of_bytes(first: Words) -> Words:
    """To take bytes `first` and `first` + 2 of a word as the lower ones of two halves."""
    return u32(0x4240) + u32(0x101) * first


def _alike(*args: Words) -> list[Words]:
    shape = jnp.broadcast_shapes(*(x.shape for x in args))
    return [jnp.broadcast_to(x, shape) for x in args]


def two_bfloat16s(low: Float[Array, "..."], high: Float[Array, "..."]) -> Words:
    """Two float32s that are bfloat16s, as these, in a word."""
    low, high = (lax.bitcast_convert_type(x, jnp.uint32) for x in (low, high))
    return (low >> 16) | (high & u32(0xFFFF0000))


def _asm(code: str, constraints: str, *args: Array, dtype=jnp.int32) -> Array:
    """Of words, for each thread; integers are unsigned."""
    from jax.experimental.pallas import triton

    shape = [jax.ShapeDtypeStruct(args[0].shape, dtype)]
    [out] = triton.elementwise_inline_asm(code, args=args, constraints=constraints, pack=1, result_shape_dtypes=shape)
    return u32(out) if dtype == jnp.int32 else out
