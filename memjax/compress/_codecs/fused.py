"""Single instructions of NVIDIA GPUs, for kernels.

`x * y + z` is rounded once: Triton is told not to contract operations.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
