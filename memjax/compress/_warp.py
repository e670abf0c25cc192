"""What the kernels ask of a warp of 32 threads: on a GPU an instruction or two each, and in interpreted kernels the same
in `jax.numpy`.

Thread l holds what is at index l of the last axis of every array.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from memjax.compress._bits import WORD, Words, u32
from memjax.compress._quantize import quantize_magnitude
from memjax.compress._tiles import LANES

Lane = UInt32[Array, "*more 32"]

INTEGER = (
    0x4B000000  # the bits of the float32 2^23, from which on floats have no fraction: their low bits are an integer
)


@dataclasses.dataclass(frozen=True)
class Warp:
    """`native`: by PTX."""

    native: bool

    def fetch_add(self, ref, x: Int32[Array, ""]) -> Int32[Array, ""]:
        """`ref[0] += x`, at once; the value before."""
        from jax.experimental.pallas import triton

        if self.native:
            return triton.atomic_add(ref, (0,), x)
        before = ref[0]
        ref[0] = before + x
        return before

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

    def append_top_bit(self, word: Words, other: Words) -> Lane:
        """`word << 1 | other >> 31`."""
        if not self.native:
            return (word << 1) | (other >> 31)
        return _asm("shf.l.wrap.b32 $0, $1, $2, 1;", "=r,r,r", other, word)  # of which compilers make more instructions

    def ones(self, word: Words) -> Lane:
        """How many bits are set."""
        return _asm("popc.b32 $0, $1;", "=r,r", word) if self.native else lax.population_count(word)

    def bit_length(self, word: Words) -> Lane:
        """Bits needed to write a word."""
        return u32(WORD) - (_asm("clz.b32 $0, $1;", "=r,r", word) if self.native else lax.clz(word))

    def total(self, x: Lane) -> Lane:
        """The sum over all threads, in each."""
        if not self.native:
            return jnp.broadcast_to(jnp.sum(x, -1, dtype=jnp.uint32, keepdims=True), x.shape)
        return _asm("redux.sync.add.u32 $0, $1, 0xffffffff;", "=r,r", x)

    def steps(self, wide: Words, exponent: Int32[Array, "..."], inverse: Float[Array, "..."]) -> Lane:
        """`INTEGER` + ceil(|x| / 2^exponent); if that is 2^23 or more, or |x| not finite, anything that is more than that.

        Args:
          wide: the bits of x as a float32.
          inverse: 2^-exponent.
        """
        if self.native:
            x = lax.bitcast_convert_type(wide, jnp.float32)
            inverse = jnp.broadcast_to(inverse, x.shape)
            two_23 = jnp.full(x.shape, 2.0**23, jnp.float32)
            # The sign is taken off by the multiplication, for free. It is exact, but for subnormal quotients, whose ceiling
            # stays 1.
            asm = "{ .reg .f32 t; abs.f32 t, $1; mul.rp.f32 t, t, $2; add.rp.f32 $0, t, $3; }"
            rounded = _asm(asm, "=f,f,f,f", x, inverse, two_23, dtype=jnp.float32)
            return lax.bitcast_convert_type(rounded, jnp.uint32)
        q, too_large = quantize_magnitude(wide & u32(0x7FFFFFFF), exponent)
        return u32(INTEGER) + jnp.where(too_large, u32(2**23), q)

    def bfloat16_pairs(self, word: Words, step: Lane, minus_half: Lane) -> tuple[Lane, Lane]:
        """Two words, of bytes 0 and 1 and of bytes 2 and 3: max(byte * step + minus_half, 0), for bytes below 128, in bfloat16.

        `step` and `minus_half` hold two equal bfloat16s. A byte beside 0x43 is the bfloat16 128 + byte. Native only.
        """
        step, minus_half = (jnp.broadcast_to(x, word.shape) for x in (step, minus_half))

        def pair(selected):
            return _asm(
                "{ .reg .b32 t, one, minus_128; mov.b32 one, 0x3F803F80; mov.b32 minus_128, 0xC300C300;"
                f" prmt.b32 t, $1, 0x43434343, {selected:#x}; fma.rn.bf16x2 t, t, one, minus_128;"
                " fma.rn.relu.bf16x2 $0, t, $2, $3; }",
                "=r,r,r,r",
                word,
                step,
                minus_half,
            )

        return pair(0x4140), pair(0x4342)


def _asm(code: str, constraints: str, *args: Array, dtype=jnp.int32) -> Array:
    """Of words, for each thread; integers are unsigned."""
    from jax.experimental.pallas import triton

    shape = [jax.ShapeDtypeStruct(args[0].shape, dtype)]
    [out] = triton.elementwise_inline_asm(code, args=args, constraints=constraints, pack=1, result_shape_dtypes=shape)
    return u32(out) if dtype == jnp.int32 else out
