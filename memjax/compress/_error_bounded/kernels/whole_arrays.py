"""Calls of Pallas kernels that index whole arrays."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from memjax._core.arrays import vary, varying_axes
from memjax._core.compat import varying_like


def call(kernel, args: Sequence[Any], out_shape: Any, *, programs: int, warps: int, interpret: bool, **options) -> Any:
    """What `kernel` writes, called `programs` times with references to all of `args` and of the outputs.

    Neither JAX nor compilers see anything of the arrays but their dtype: those of any size share a kernel, traced once, and
    compiled once in a module. What kernels are given is where an array begins, by a block of one value, for there nothing
    checks what is beyond. Interpreted ones are given the array.

    In a `shard_map`, all differs over the mesh axes over which any of `args` does.
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
