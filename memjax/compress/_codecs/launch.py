"""What the kernels of codecs share: where they can run, the types of their results, and their settings."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

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
    """Whether Pallas's Triton backend compiles for the GPU available."""
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
