"""What only runs on one platform, told when a program is compiled: tracing does not know what it will be compiled for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_only_on_cuda_p = Primitive("only_on_cuda")


def only_on_cuda(value: jax.Array, error: str) -> jax.Array:
    """`value`. Compiling the program for anything but NVIDIA GPUs raises a ValueError with the text `error`."""
    return _only_on_cuda_p.bind(value, error=error)


def _refuse(context: Any, value: Any, *, error: str) -> Any:
    raise ValueError(error)


_only_on_cuda_p.def_abstract_eval(lambda value, *, error: value)
_only_on_cuda_p.def_impl(lambda value, *, error: jax.jit(lambda a: _only_on_cuda_p.bind(a, error=error))(value))
batching.primitive_batchers[_only_on_cuda_p] = lambda args, dims, *, error: (only_on_cuda(args[0], error), dims[0])
mlir.register_lowering(_only_on_cuda_p, _refuse)
mlir.register_lowering(_only_on_cuda_p, lambda context, value, *, error: [value], platform="cuda")


def no_jax_triton() -> str | None:
    """Why kernels cannot be launched through `jax_triton`, or None."""
    if importlib.util.find_spec("jax_triton") is None or importlib.util.find_spec("triton") is None:
        return "jax_triton is not installed (pip install 'memjax[gpu]')"
    version = importlib.metadata.version("jax-triton")
    if not version.startswith("0.3."):
        return f"jax_triton is version {version}, which launches kernels otherwise than 0.3 (pip install 'memjax[gpu]')"
    return None
