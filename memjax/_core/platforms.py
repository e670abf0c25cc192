"""Which device a program is for: as far as tracing knows, and what only runs on one platform, told when it is compiled."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh, use_abstract_mesh

from memjax._core.compat import is_described, typed_on_host
from memjax._core.meshes import device_of, devices_of, is_in_host_memory, own_sharding, platform_of

P = ParamSpec("P")
R = TypeVar("R")

_described: dict[str, Any] = {}  # devices that are not there, by kind


def traced_for_arguments(f: Callable[P, R]) -> Callable[P, R]:
    """`f`, which traces programs, for the devices of its arguments, if these are not there, and for the memories of types.

    JAX traces for the devices of this machine, unless its abstract mesh names another. Traces are kept by that mesh, and it is
    there again where equations are lowered. Arrays on the host have types of their own; types of arrays there have not.
    """

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, tree = jax.tree.flatten((args, kwargs))
        shardings = list(map(own_sharding, leaves))
        every: Any = args, kwargs
        if any(map(_is_type_on_host, leaves)):
            every = jax.tree.unflatten(
                tree, [typed_on_host(leaf) if _is_type_on_host(leaf) else leaf for leaf in leaves]
            )
        with _traced_for(shardings):
            return f(*every[0], **every[1])

    return run


def _is_type_on_host(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and is_in_host_memory(own_sharding(leaf))


def _traced_for(shardings: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    device = device_of(shardings)
    if not is_described(device):
        return contextlib.nullcontext()
    _described[device.device_kind] = device
    # Of several devices only a `jax.shard_map` has kernels, and its mesh names their kind.
    if len(devices_of(shardings)) > 1 or not get_abstract_mesh().empty:
        return contextlib.nullcontext()
    named = AbstractDevice(device_kind=device.device_kind, num_cores=None, platform=platform_of(shardings))
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=named))


def traced_device() -> Any:
    """The device that programs are traced for: the default one, or one that is not there (`traced_for_arguments`)."""
    here, named = jax.devices()[0], get_abstract_mesh().abstract_device
    return here if named is None or named.device_kind == here.device_kind else _described.get(named.device_kind, here)


def is_traced_for_one_device() -> bool:
    """Whether programs are traced for a single device, so that nothing divides their arrays."""
    return get_abstract_mesh().empty if is_described(traced_device()) else jax.device_count() == 1


def capability_for_triton() -> int | None:
    """The compute capability of the NVIDIA GPU that is traced for, as `jax_triton` takes it: 90. None: it asks the GPU, which is
    there."""
    device = traced_device()
    return round(10 * float(device.compute_capability)) if is_described(device) else None


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
