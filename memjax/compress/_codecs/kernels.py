"""What kernels for NVIDIA GPUs share: where they can run, their settings, short pieces of PTX."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, UInt8, UInt32

from memjax._core.arrays import vary, varying_axes
from memjax._core.compat import varying_like
from memjax._core.platforms import is_traced_for_one_device, traced_device


def is_of_one_device(aval: Any) -> bool:
    """Whether the compiler cannot divide arrays of this type among devices: it would give all of them to a kernel on each."""
    return is_of_one_device_on(aval.sharding.mesh)


def is_of_one_device_on(mesh: Any) -> bool:
    """The same of all arrays on a mesh."""
    if is_traced_for_one_device():
        return True
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return not mesh.empty and all(kind == jax.sharding.AxisType.Manual or size == 1 for kind, size in axes)


def has_kernels() -> bool:
    """Whether Pallas's Triton backend compiles for the GPU that is traced for."""
    device = traced_device()
    capability = str(getattr(device, "compute_capability", ""))  # of AMD's GPUs a name
    is_nvidia = capability.replace(".", "").isdigit()
    return device.platform == "gpu" and is_nvidia and float(capability) >= 8


def call(
    kernel: Callable[..., None],
    args: Sequence[Any],
    outs: Sequence[tuple[tuple[int, ...], Any]],
    *,
    warps: int,
    interpret: bool,
    **options: Any,
) -> Any:
    """The outputs of a Pallas kernel, a list of arrays of the shapes and dtypes in `outs`.

    In a `shard_map` they differ over all mesh axes over which any of `args` differs.
    """
    shapes: list[Any] = [jax.ShapeDtypeStruct(*out) for out in outs]
    if axes := varying_axes(*args):
        args = vary(list(map(jnp.asarray, args)), axes)
        shapes = [varying_like(jax.typeof(args[0]), *out) for out in outs]
    if not interpret:
        from jax.experimental.pallas import triton

        options["compiler_params"] = triton.CompilerParams(num_warps=warps, num_stages=1)
    return pl.pallas_call(kernel, out_shape=shapes, interpret=interpret, **options)(*args)


# Short pieces of PTX. `x * y + z` is rounded once: Triton is told not to contract operations.


def multiply_add(
    x: Float[Array, "..."], y: Float[Array, "..."], z: Float[Array, "..."], *, interpret: bool
) -> Float[Array, "..."]:
    """Rounded to the nearest float32; where a kernel is interpreted, twice."""
    return x * y + z if interpret else _multiply_add("rn", x, y, z)


def upwards(x: Float[Array, "..."], y: Float[Array, "..."], z: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x * y + z`, rounded to the next float32 above, if it is none."""
    return _multiply_add("rp", x, y, z)


def reciprocal(x: Float[Array, "..."], *, interpret: bool) -> Float[Array, "..."]:
    """1 / x, off by one digit at most; 0 or infinity where a number is subnormal."""
    return 1 / x if interpret else instruction("rcp.approx.ftz.f32 $0, $1;", "=f,f", x, dtype=jnp.float32)


def of_two(operation: str, x: Float[Array, "..."], y: Float[Array, "..."], *, interpret: bool) -> Float[Array, "..."]:
    """The smaller ("min") or the larger ("max") of two numbers, the other one if one is a NaN; with ".NaN" that."""
    if interpret:
        functions: dict[str, Any] = {"min": jnp.fmin, "max": jnp.fmax, "max.NaN": jnp.maximum}
        return functions[operation](x, y)
    kind, pack = {"bfloat16": ("bf16x2", 2), "float16": ("f16x2", 2), "float32": ("f32", 1)}[x.dtype.name]
    registers = "=r,r,r" if pack == 2 else "=f,f,f"
    return instruction(
        f"{operation}.{kind} $0, $1, $2;", registers, *jnp.broadcast_arrays(x, y), dtype=x.dtype, pack=pack
    )


def widened(x: Float[Array, "..."], *, interpret: bool) -> Float[Array, "..."]:
    """Values as float32; of a multiple of two in each thread."""
    if interpret or x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    # The compiler takes apart what two values share first, which is one instruction more.
    code = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return lax.bitcast_convert_type(instruction(code, "=&r,=r,r", x, pack=2), jnp.float32)


def second_bytes(x: Int[Array, "..."], *, interpret: bool) -> UInt8[Array, "..."]:
    """The second lowest byte of each number; of a multiple of four numbers in each thread."""
    if interpret:
        return (x >> 8).astype(jnp.uint8)
    code = (
        "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0051; prmt.b32 high, $3, $4, 0x0051; "
        "prmt.b32 $0, low, high, 0x5410; }"
    )
    return instruction(code, "=r,r,r,r,r", x, dtype=jnp.int8, pack=4).astype(jnp.uint8)


def nibbles(x: UInt8[Array, "..."], y: UInt8[Array, "..."], *, interpret: bool) -> UInt8[Array, "..."]:
    """The lower four bits of two bytes as one, `y`'s above; of a multiple of four bytes in each thread."""
    if interpret:
        return (x & 15) | (y << 4)
    code = "{ .reg .b32 high; shl.b32 high, $2, 4; lop3.b32 $0, 0x0f0f0f0f, $1, high, 0xca; }"
    return instruction(code, "=r,r,r", x, y, dtype=jnp.int8, pack=4).astype(jnp.uint8)


def packed_neighbours(x: UInt8[Array, "rows n"], below: int, width: int, *, interpret: bool) -> UInt32[Array, "rows _"]:
    """Packs `width` bits of each byte, those above the lowest `below`, with those of its neighbours into one byte, the first in
    its lowest bits. `width` is 1 or 2. The four bytes of a register must be neighbours along the last axis, the first of them at
    a multiple of four: so they are where a thread has read a whole vector.
    """
    together = lambda parts, bits: jnp.sum(
        parts << (bits * lax.broadcasted_iota(jnp.uint32, parts.shape, 2)), 2, dtype=jnp.uint32
    )
    in_parts = lambda values, size: values.astype(jnp.uint32).reshape(x.shape[0], -1, size)
    if interpret:
        return together((in_parts(x, 8 // width) >> below) & (2**width - 1), width)
    # Of four bytes at a time, those of a register: the factor moves what is wanted of each of them into the highest one.
    mask, factor = (0x01010101, 0x01020408) if width == 1 else (0x03030303, 0x01041040)
    code = f"shr.b32 $0, $1, {below}; and.b32 $0, $0, {mask:#x}; mul.lo.u32 $0, $0, {factor:#x}; shr.b32 $0, $0, 24;"
    found = in_parts(instruction(code, "=r,r", x, dtype=jnp.int8, pack=4).astype(jnp.uint8), 4)
    first = lax.broadcasted_iota(jnp.int32, found.shape, 2) == 0  # it has the parts of all four
    fours = jnp.sum(jnp.where(first, found, 0), 2, dtype=jnp.uint32)
    return fours if width == 2 else together(in_parts(fours, 2), 4)


def less_bytes(
    x: UInt32[Array, "... n"], bytes_of: UInt32[Array, "... n"], *, interpret: bool
) -> UInt32[Array, "... n"]:
    """`x` less one byte of each of `bytes_of`, in turn along the last axis, the lowest first."""
    turn = lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1) & 3
    if interpret:
        return x - ((bytes_of >> (turn << 3)) & 0xFF)
    code = "{ .reg .b32 byte; prmt.b32 byte, $2, 0, $3; sub.s32 $0, $1, byte; }"
    return instruction(code, "=r,r,r,r", x, bytes_of, turn | 0x4440)


def _multiply_add(rounding: str, *args: Array) -> Array:
    code = f"fma.{rounding}.f32 $0, $1, $2, $3;"
    return instruction(code, "=f,f,f,f", *jnp.broadcast_arrays(*args), dtype=jnp.float32)


def instruction(code: str, constraints: str, *args: Array, dtype: Any = jnp.int32, pack: int = 1) -> Array:
    """Run PTX in each thread, for `pack` numbers of it at a time, whichever these are; 32-bit integers are unsigned."""
    from jax.experimental.pallas import triton

    like = [jax.ShapeDtypeStruct(args[0].shape, dtype)]
    [out] = triton.elementwise_inline_asm(code, args=args, constraints=constraints, pack=pack, result_shape_dtypes=like)
    return out.astype(jnp.uint32) if dtype == jnp.int32 else out


def call_on_whole_arrays(
    kernel: Callable[..., None], args: Sequence[Any], outs: Sequence[Any], *, programs: int, interpret: bool, **options
) -> Any:
    """The outputs of `kernel`, which runs `programs` times with references to all of `args` and to its flat outputs.

    JAX and compilers know only the dtype of the arrays, so that arrays of all sizes share a kernel, which is traced once, and
    compiled once in a module. A kernel gets a block of one value at the beginning of an array, and nothing checks what it reads
    beyond. An interpreted kernel gets the array.
    """
    whole = lambda size: pl.BlockSpec((pl.Element(size if interpret else 1),), lambda _: (0,))
    in_specs, out_specs = [whole(x.size) for x in args], [whole(size) for [size], _ in outs]
    options |= {"grid": (programs,), "in_specs": in_specs, "out_specs": out_specs}
    return call(kernel, args, outs, interpret=interpret, **options)
