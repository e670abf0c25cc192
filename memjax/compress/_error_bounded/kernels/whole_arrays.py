"""Calls of Pallas kernels that index whole arrays."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from memjax._core.arrays import vary, varying_axes
from memjax._core.compat import varying_like


def call(kernel, args: Sequence[Any], out_shape: Any, *, programs: int, warps: int, interpret: bool, **options) -> Any:
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
