"""What kernels for NVIDIA GPUs share: where they can run, their settings, single instructions, and pairs of levels."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, UInt

from memjax._core.arrays import vary, varying_axes
from memjax._core.compat import varying_like


def is_of_one_device(aval: Any) -> bool:
    """Whether the compiler cannot divide arrays of this type among devices: it would give all of them to a kernel on each."""
    return is_of_one_device_on(aval.sharding.mesh)


def is_of_one_device_on(mesh: Any) -> bool:
    """The same of all arrays on a mesh."""
    if jax.device_count() == 1:
        return True
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return not mesh.empty and all(kind == jax.sharding.AxisType.Manual or size == 1 for kind, size in axes)


def has_kernels() -> bool:
    """Whether Pallas's Triton backend compiles for the available GPU."""
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))  # of AMD's GPUs a name
    is_nvidia = capability.replace(".", "").isdigit()
    return jax.default_backend() == "gpu" and is_nvidia and float(capability) >= 8


def on_same_axes(args: list[Array], outs: Sequence[tuple[tuple[int, ...], Any]]) -> tuple[list[Array], list[Any]]:
    """The arguments of a kernel, and the types of its results from shapes and dtypes, with the same varying mesh axes."""
    axes = varying_axes(*args)
    if not axes:
        return args, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outs]
    args = vary(args, axes)
    return args, [varying_like(jax.typeof(args[0]), shape, dtype) for shape, dtype in outs]


def params(*, num_warps: int) -> Any:
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=num_warps, num_stages=1)


# Single instructions. `x * y + z` is rounded once: Triton is told not to contract operations.


def nearest(x: Float[Array, "..."], y: Float[Array, "..."], z: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounded to the nearest float32."""
    return _multiply_add("rn", x, y, z)


def upwards(x: Float[Array, "..."], y: Float[Array, "..."], z: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounded to the next float32 above, if it is none."""
    return _multiply_add("rp", x, y, z)


def interpreted(x: Float[Array, "..."], y: Float[Array, "..."], z: Float[Array, "..."]) -> Float[Array, "..."]:
    """What stands for `nearest` where a kernel is interpreted: rounded twice."""
    return x * y + z


def reciprocal(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / x, off by one digit at most; 0 or infinity where a number is subnormal."""
    return _instruction("rcp.approx.ftz.f32 $0, $1;", x)


def _multiply_add(rounding: str, *args: Array) -> Array:
    return _instruction(f"fma.{rounding}.f32 $0, $1, $2, $3;", *jnp.broadcast_arrays(*args))


def _instruction(text: str, *args: Array) -> Array:
    from jax.experimental.pallas import triton

    like = jax.ShapeDtypeStruct(args[0].shape, jnp.float32)
    constraints = ",".join(["=f", *["f"] * len(args)])
    [out] = triton.elementwise_inline_asm(text, args=args, constraints=constraints, pack=1, result_shape_dtypes=[like])
    return out


# Levels of two neighbouring channels in one number, as a kernel writes them: 4 bits each in a byte, or 8 bits each in
# two bytes. In memory they are what XLA has as an array of 4-bit or 8-bit numbers.

PAIR = {4: jnp.uint8, 8: jnp.uint16}


def paired(levels: Int[Array, "rows channels"], bits: int) -> Int[Array, "rows pairs"]:
    """Pairs of levels, the first in the lower bits; in a kernel. What `levels` have above the lowest bits does not matter."""
    pairs = (levels & (2**bits - 1)).reshape(levels.shape[0], -1, 2)
    return jnp.sum(pairs << (bits * lax.broadcasted_iota(jnp.int32, pairs.shape, 2)), axis=2)


def as_pairs(levels: UInt[Array, "... channels"], bits: int) -> UInt[Array, "... pairs"]:
    """The same of XLA's numbers of so many bits."""
    pairs = levels.reshape(*levels.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(pairs, PAIR[bits])


def apart(levels: UInt[Array, "... numbers"], channels: int) -> UInt[Array, "... channels"]:
    """The levels, of what may be pairs of them."""
    if levels.shape[-1] == channels:
        return levels
    alone = jnp.uint8 if levels.dtype == jnp.uint16 else jnp.uint4
    return lax.bitcast_convert_type(levels, alone).reshape(*levels.shape[:-1], channels)


def unpaired(pairs: Int[Array, "rows pairs"], bits: int) -> Int[Array, "rows channels"]:
    """The levels of pairs; in a kernel."""
    places = bits * lax.broadcasted_iota(jnp.int32, (*pairs.shape, 2), 2)
    return ((pairs[:, :, None] >> places) & (2**bits - 1)).reshape(pairs.shape[0], -1)


def call_on_whole_arrays(
    kernel, args: Sequence[Any], out_shape: Any, *, programs: int, warps: int, interpret: bool, **options
) -> Any:
    """The outputs of `kernel`, which runs `programs` times with references to all of `args` and to the outputs.

    JAX and compilers know only the dtype of the arrays, so that arrays of all sizes share a kernel, which is traced once, and
    compiled once in a module. A kernel gets a block of one value at the beginning of an array, and nothing checks what it reads
    beyond. An interpreted kernel gets the array.

    In a `shard_map`, outputs differ over all mesh axes over which any of `args` differs.
    """

    def whole(x):
        return pl.BlockSpec((pl.Element(x.size if interpret else 1),), lambda _: (0,))

    if not interpret:
        from jax.experimental.pallas import triton

        options["compiler_params"] = triton.CompilerParams(num_warps=warps, num_stages=1)
    if axes := varying_axes(*args):
        args = vary(list(map(jax.numpy.asarray, args)), axes)
        like = jax.typeof(args[0])
        out_shape = jax.tree.map(lambda x: varying_like(like, x.shape, x.dtype), out_shape)
    specs = {"in_specs": [*map(whole, args)], "out_specs": jax.tree.map(whole, out_shape)}
    return pl.pallas_call(kernel, out_shape=out_shape, grid=(programs,), interpret=interpret, **specs, **options)(*args)
