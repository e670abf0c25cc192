"""What JAX keeps changing, each behind one function. When a release moves or renames something, change this package.

JAX's private modules, which kernels are made with, are imported in two more places, since each import is large and may fail:
`memjax.compress._error_bounded.kernel_memory` and `memjax._attention.cudnn`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.extend.source_info_util import user_context
from jax.interpreters import batching
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return os.path.dirname(spec.origin) + os.sep if spec is not None and spec.origin else f"{os.sep}{package}{os.sep}"


# Frames of these are not the user's.
_LIBRARIES = tuple(_folder(package) for package in ("jax", "flax", "memjax", "optax"))
_TRANSFORM = re.compile(r"\w+\(|\)")
HOST = "pinned_host"  # its memory, as JAX calls it
_DERIVATIVE = re.compile(r"\b(jvp|transpose)\(")


def makes_two_words(key: Any) -> bool:
    """Whether two words are made of each random number of a key of this dtype, and combined by whatever reads the number."""
    return str(key) == "key<fry>" and bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]


def is_ordered(eqn: Any) -> bool:
    """Whether the equation has ordered effects, as `io_callback(..., ordered=True)` does."""
    return any(type(effect).__name__.startswith("Ordered") for effect in eqn.effects)


def varying(aval: Any) -> frozenset[str]:
    """Mesh axes over which values of this type differ, inside a `jax.shard_map` that tracks it."""
    return frozenset(aval.manual_axis_type.varying) if aval.manual_axis_type is not None else frozenset()


def varying_like(aval: Any, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """A type of that shape and dtype whose values differ over the same mesh axes."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=aval.manual_axis_type)


def explicit_sharding(aval: Any, leading: int = 0) -> NamedSharding | None:
    """The sharding that the type states, with `leading` unsharded dimensions in front. None: it states none.

    Types state a sharding on a mesh of explicit axes (`AxisType.Explicit`).
    """
    sharding = getattr(aval, "sharding", None)
    if sharding is None or not sharding.mesh.explicit_axes:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*[None] * leading, *sharding.spec))


def mesh_axes(aval: Any) -> tuple[dict[str, int], frozenset[str]]:
    """The axis sizes of the mesh that a value lives on, as far as its type tells, and the names of the automatic axes.

    The type of an argument on a mesh names the mesh. The type of a computed value may not.
    """
    mesh = aval.sharding.mesh
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    return dict(mesh.shape), frozenset(mesh.auto_axes)


def is_in_order(effect: Any) -> bool:
    """Whether the effect is ordered: JAX runs equations with it in program order, as for `io_callback(ordered=True)`."""
    return type(effect).__name__.startswith("Ordered")


def parameters(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation."""
    return eqn.params["_prim"].params if "_prim" in eqn.params else eqn.params


def primitive_name(eqn: Any) -> str:
    """The name of an equation's primitive. JAX's newer primitives share one name; the name of their class is returned."""
    return type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name


def bodies(eqn: Any) -> list[Any]:
    """The programs inside an equation: of a call, a loop, the branches of a `cond`."""
    # Rules of a custom derivative that nobody asked for (an undifferentiated call) are functions, not jaxprs.
    traced = parameters(eqn).get("traced")
    if traced is not None:  # a custom_vjp, with JAX_CUSTOM_VJP3=1
        return [traced.jaxpr.jaxpr]
    return [getattr(body, "jaxpr", body) for body in jaxprs_in_params(parameters(eqn))]


def name_stack(eqn: Any) -> str:
    """The named scopes and transformations that an equation was traced in: "jvp(block)/conv"."""
    return str(eqn.source_info.name_stack)


def derivatives(stack: str) -> list[str]:
    """The marks "jvp" and "transpose" that derivatives leave in a name stack, the outermost first."""
    return _DERIVATIVE.findall(stack) if "jvp(" in stack else []  # a transpose alone is that of a linear function


def is_backward(stack: str) -> bool:
    """Whether a name stack is that of a backward pass."""
    return "transpose" in derivatives(stack)


def scope(eqn: Any) -> str:
    """The `jax.named_scope`s around an equation, "block/conv"; Linen modules make one each."""
    return _TRANSFORM.sub("", name_stack(eqn))


def nested(eqn: Any, outer: Any) -> Any:
    """An equation of a call's body, put into the scopes of the call `outer` as well. `outer=None`: the equation as it is.

    In functions of libraries it has the user's line that makes the call: the lines of a body begin where its trace began.
    """
    if outer is None:
        return eqn
    own, around = eqn.source_info, outer.source_info
    traceback = own.traceback if _has_users_frames(own.traceback) else around.traceback
    return eqn.replace(source_info=own.replace(name_stack=around.name_stack + own.name_stack, traceback=traceback))


@functools.lru_cache(maxsize=4096)
def _has_users_frames(traceback: Any) -> bool:
    return traceback is not None and any(is_users(frame.file_name) for frame in traceback.frames)


def settings(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """A context with the settings that an equation was traced with."""
    return eqn.ctx.manager


def lines(eqn: Any, *, marked: bool = False) -> contextlib.AbstractContextManager[Any]:
    """A context in which what is traced counts as made where the equation was: by the same lines of the user's code.

    `marked`: with its whole name stack as well.
    """
    if not marked:
        return user_context(eqn.source_info.traceback)
    return user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack)


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a program, calls as they are."""
    return jax.core.eval_jaxpr(jaxpr, consts, *inputs)


def without_dead_code(jaxpr: Any) -> Any:
    """The program without equations that no output depends on."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def lower_early(primitive: Any, rule: Callable[..., Any]) -> None:
    """Makes JAX lower this primitive by `rule` where it lowers the derivatives of a `jax.custom_vjp`.

    With `JAX_CUSTOM_VJP3=1` that is in a pass of its own, before all other primitives are lowered.
    """
    primitive.is_high = lambda *_, **__: _has_new_custom_vjp()
    primitive.to_lojax = rule


def in_forward_rule(f: Callable[..., Any]) -> Callable[..., Any]:
    """A `jax.custom_jvp` that the forward rule of a `jax.custom_vjp` calls.

    Under `jax.checkpoint`, `JAX_CUSTOM_VJP3=1` runs it twice, at which it raises StoreException; in a `jax.jit` it may.
    """
    return jax.jit(f, inline=True) if _has_new_custom_vjp() else f


def _has_new_custom_vjp() -> bool:
    return bool(getattr(jax.config, "jax_custom_vjp3", False))


def is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def matmul_precision() -> str | None:
    """The setting of `jax.default_matmul_precision`."""
    return getattr(jax.config, "jax_default_matmul_precision", None)


def is_described(device: Any) -> bool:
    """Whether a device is one of a topology (`jax.experimental.topologies`): JAX compiles for it, and it is not there."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def typed_on_host(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same, so that it is traced as an array with its sharding in the memory of the host is. JAX 0.10 cannot do that."""
    return struct.update(_memory_space=jax.memory.Space.Host) if hasattr(struct, "_memory_space") else struct


def type_on_host(shape: Sequence[int], dtype: Any, weak_type: bool, sharding: Any) -> Any:
    """What is traced as an array with this sharding in the memory of the host: a type, or with JAX 0.10 an array of zeros."""
    struct = jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=weak_type, sharding=sharding)
    is_known = hasattr(struct, "_memory_space")
    return typed_on_host(struct) if is_known else jax.device_put(np.zeros(shape, dtype), sharding)


class _OnHostOfDescribed(SingleDeviceSharding):
    """In the memory of the host of a device that is not there. JAX drops memory kinds that it knows of no device."""

    @property
    def memory_kind(self) -> str:
        return HOST


def on_host(sharding: Any) -> Any | None:
    """The sharding of the same parts in the pinned memory of the host; None where JAX knows none."""
    device = next(iter(sharding.device_set))
    if is_described(device):
        return _OnHostOfDescribed(device) if len(sharding.device_set) == 1 else None
    return sharding.with_memory_kind(HOST) if HOST in {one.kind for one in device.addressable_memories()} else None


def is_x64() -> bool:
    """The setting of `jax.enable_x64`."""
    return bool(getattr(jax.config, "jax_enable_x64", False))


def is_batched(value: Any) -> bool:
    """Whether `jax.vmap` traces with this value, which stands for one example."""
    return type(value).__name__ == "BatchTracer"


def names_an_axis(effect: Any) -> bool:
    """Whether the effect is that of a collective over a named axis."""
    return type(effect).__name__ == "NamedAxisEffect"


def register_batcher(primitive: Any, rule: Callable[..., Any]) -> None:
    """Makes `rule(axis_name, args, dims, **parameters)` batch the primitive. An axis without a name has None."""

    def batch(axis: Any, args: Any, dims: Any, **parameters: Any) -> Any:
        return rule(axis.name if isinstance(axis.name, str) else None, args, dims, **parameters)

    batching.fancy_primitive_batchers[primitive] = batch


class Frame(NamedTuple):
    """A line of Python, in a function ("Block.__call__")."""

    file: str
    line: int
    function: str


def user_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Those that are not in JAX, Flax, optax or memjax."""
    return [frame for frame in frames if is_users(frame.file)]


def is_users(file: str) -> bool:
    """Whether a file is not one of JAX, Flax, optax or memjax."""
    return not file.startswith((*_LIBRARIES, "<frozen"))


def is_memjax(file: str) -> bool:
    """Whether a file is one of memjax."""
    return file.startswith(_folder("memjax"))


def jit_options(f: Any) -> dict[str, Any]:
    """The options that a function under `jax.jit` or `nnx.jit` was given, but for the shardings of `nnx.jit`."""
    info = getattr(getattr(f, "jitted_fn", f), "_jit_info", None)
    if info is None:
        return {}
    parameters = [*info.fun_signature.parameters] if info.fun_signature is not None else []
    found: dict[str, Any] = {"keep_unused": info.keep_unused, "compiler_options": dict(info.compiler_options_kvs)}
    for kind in ("static", "donate"):
        numbers = tuple(getattr(info, f"{kind}_argnums") or ())
        known = {parameters[i] for i in numbers if i < len(parameters)}  # JAX has added the names of the numbers
        names = tuple(name for name in getattr(info, f"{kind}_argnames") or () if name not in known)
        found |= {f"{kind}_argnums": numbers, f"{kind}_argnames": names}
    for name in ("in_shardings", "out_shardings") if hasattr(f, "_jit_info") else ():
        leaves, tree = getattr(info, f"{name}_leaves"), getattr(info, f"{name}_treedef")
        given = [None if type(leaf).__name__ == "UnspecifiedValue" else leaf for leaf in leaves]
        found[name] = jax.tree.unflatten(tree, given) if any(leaf is not None for leaf in given) else None
    return {name: value for name, value in found.items() if value}


def frames(eqn: Any) -> list[Frame]:
    """The user's lines that make an equation, the outermost first. Within a body they begin where its trace began."""
    traceback = eqn.source_info.traceback
    raw = [] if traceback is None else traceback.frames
    return user_frames([Frame(frame.file_name, frame.line_num, frame.function_name) for frame in reversed(raw)])


def call_site(eqn: Any) -> tuple[Any, ...]:
    """Where an equation is made, exactly: code objects, and positions in them. The same again if that code runs again."""
    traceback = eqn.source_info.traceback
    return () if traceback is None else tuple(zip(*traceback.raw_frames(), strict=True))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried.

    Told by shapes, for JAX 0.12 names these numbers otherwise: what is scanned over, or stacked, has an axis more outside.
    """
    (body,) = bodies(eqn)
    same = lambda outer, inner: sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))
    carried = same(eqn.outvars, body.outvars)
    return same(eqn.invars, body.invars) - carried, carried
