"""What a function costs in memory, compute and compile time, mostly without running it."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from memjax._residuals import differentiated, residual_bytes

_JITTED = type(jax.jit(lambda: None))


def remat_compiler_options(backend: str | None = None) -> dict[str, str]:
    """Compiler options without which recomputation saves no memory on `backend` (None: the default one).

    With JAX 0.10, XLA:CPU drops the optimisation barriers that keep recomputed values apart and then merges
    them with the originals, so on a CPU `jax.checkpoint`, and everything in memjax that recomputes, saves no
    memory by default. The gradients are the same either way. To make the saving real there:

        step = jax.jit(step, compiler_options=memjax.remat_compiler_options())

    or, for all programs of a process, set `XLA_FLAGS=--xla_disable_hlo_passes=cse_barrier_expander` before
    JAX starts. From JAX 0.11 on recomputation is kept without these options, and with them XLA:CPU aborts on
    barriers in small loops; GPUs and TPUs honour the barriers. There the result is empty.
    `memjax.measure` sets these options itself.
    """
    backend = jax.default_backend() if backend is None else backend
    needed = backend == "cpu" and jax.__version_info__ < (0, 11)
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if needed else {}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What `memjax.measure` found. Bytes and seconds; None where a figure cannot be had, `notes` saying why.

    Attributes:
      residual_bytes: device memory held between forward and backward: what the forward pass makes and the
        backward pass reads, arguments and constants not included, at the moment when it is largest. Whole
        arrays, all devices together. None if `fn` cannot be differentiated. This is what JAX saves: the
        compiler may compute cheap values again instead, so `temp_bytes` can be smaller.
      offloaded_bytes: the same, of what is held in host memory.
      temp_bytes: the compiled program's scratch memory, residuals included (per device).
      argument_bytes: the compiled program's arguments; those it does not use are not counted (per device).
      output_bytes: the compiled program's results (per device).
      flops: the compiler's estimate for one execution. Some backends count the body of a loop once.
      compile_seconds: tracing, lowering and compiling. Short if JAX has a trace or a cache entry already.
      peak_bytes: the largest memory of one execution, its arguments included (of the device that needs most).
      notes: what could not be measured, and why.
    """

    residual_bytes: int | None
    offloaded_bytes: int | None
    temp_bytes: int | None
    argument_bytes: int | None
    output_bytes: int | None
    flops: float | None
    compile_seconds: float
    peak_bytes: int | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, ready for `json.dumps`."""
        return dataclasses.asdict(self) | {"notes": list(self.notes)}

    def __str__(self) -> str:
        rows = [
            ("residual", _bytes(self.residual_bytes)),
            ("offloaded to host", _bytes(self.offloaded_bytes)),
            ("temp (compiled)", _bytes(self.temp_bytes)),
            ("arguments", _bytes(self.argument_bytes)),
            ("outputs", _bytes(self.output_bytes)),
            ("peak of one run", _bytes(self.peak_bytes)),
            ("compute", "unknown" if self.flops is None else f"{_scaled(self.flops, 1000)}FLOP"),
            ("compile time", f"{self.compile_seconds:.2f} s"),
        ]
        lines = [f"{label:<18} {value}" for label, value in rows]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def measure(fn: Callable, *args: Any, compiler_options: dict[str, Any] | None = None) -> Measurement:
    """Bytes, FLOPs and compile time of `fn(*args)`.

    `measure(loss, params, batch)`, `measure(jax.value_and_grad(loss), params, batch)` and
    `measure(train_step, state, batch)` report the same residual bytes as long as they differentiate the same
    thing: if `fn` contains a backward pass, that one is measured; if not, its reverse-mode derivative with
    respect to all of its float arguments is. If its result is a scalar float, or a tuple that begins with
    one, that is the loss and the rest is auxiliary, as with `jax.grad(..., has_aux=True)`. The other figures
    are always those of `fn` itself: for the temporary memory of training, measure a function that computes
    gradients.

    Nothing is executed, except once if all arguments are arrays and their devices keep memory statistics
    (GPUs and TPUs do, CPUs do not): that gives `peak_bytes`. Donated arguments are copied first, so `args`
    stay valid. A device's peak counter never goes down, so the figure is only known if this execution reached
    a new peak, and is then exact up to the allocator's rounding: for true figures of several functions,
    measure each in a process of its own. Side effects of `fn` (callbacks, prints) happen in that execution.

    Args:
      fn: a function, under `jax.jit` or not. Its own shardings, donation and compiler options are kept.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s (also mixed), of any dtype, typed PRNG keys
        included. What is static is closed over or bound with `functools.partial`.
      compiler_options: passed to the compiler. None means `remat_compiler_options()`: on a CPU
        rematerialisation may save nothing without (see there), and a program compiled by plain `jax.jit`
        can then need more memory than is reported here.

    Raises:
      TypeError: `fn` is not callable, or a leaf of an argument is no array.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}. Call memjax.measure(fn, *args), not measure(fn(*args)).")
    _check_arguments(args)
    jitted = fn if isinstance(fn, _JITTED) else jax.jit(fn)
    options = remat_compiler_options() if compiler_options is None else compiler_options
    notes: list[str] = []

    start = time.perf_counter()
    traced = jitted.trace(*args)
    compiled = traced.lower().compile(compiler_options=options or None)
    compile_seconds = time.perf_counter() - start

    residuals = _residuals(traced, notes)
    memory = compiled.memory_analysis()
    if memory is None:
        notes.append("compiled bytes unknown: the backend gives no memory analysis")
    argument_bytes = None if memory is None else memory.argument_size_in_bytes
    return Measurement(
        residual_bytes=None if residuals is None else residuals.device,
        offloaded_bytes=None if residuals is None else residuals.host,
        temp_bytes=None if memory is None else memory.temp_size_in_bytes,
        argument_bytes=argument_bytes,
        output_bytes=None if memory is None else memory.output_size_in_bytes,
        flops=(compiled.cost_analysis() or {}).get("flops"),
        compile_seconds=compile_seconds,
        peak_bytes=_runtime_peak(compiled, args, argument_bytes, notes),
        notes=tuple(notes),
    )


def _check_arguments(args: tuple) -> None:
    for position, arg in enumerate(args):
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            is_number = isinstance(leaf, (bool, int, float, complex))
            if not is_number and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise TypeError(
                    f"args[{position}]{jax.tree_util.keystr(path)} must be an array or a "
                    f"jax.ShapeDtypeStruct, got {leaf!r} of type {type(leaf).__name__}. "
                    "Bind what is static with functools.partial."
                )


def _residuals(traced, notes: list[str]):
    found = residual_bytes(traced.jaxpr)
    if found is not None:
        return found
    out = traced.out_info
    first = out[0] if isinstance(out, tuple) and out else out
    is_loss = getattr(first, "shape", None) == () and jax.numpy.issubdtype(first.dtype, jax.numpy.floating)
    try:
        both = differentiated(traced.jaxpr, has_aux=is_loss)
    except (NotImplementedError, TypeError, ValueError) as error:
        notes.append(f"residual bytes unknown: fn cannot be differentiated: {str(error).splitlines()[0]}")
        return None
    if both is None:
        notes.append("residual bytes unknown: fn has no float argument or no float result to differentiate")
        return None
    return residual_bytes(both)


def _runtime_peak(compiled, args: tuple, argument_bytes: int | None, notes: list[str]) -> int | None:
    leaves = jax.tree.leaves(args)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        notes.append("peak_bytes unknown: abstract arguments are not executed")
        return None
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = sorted(shardings[0].addressable_devices, key=lambda device: device.id)
    if argument_bytes is None or any(_memory_stats(device) is None for device in devices):
        notes.append("peak_bytes unknown: the device keeps no memory statistics")
        return None

    def own(info, leaf):
        # The baseline below counts what lies on the device already, so host arrays have to be there too.
        on_device = isinstance(leaf, jax.Array)
        return leaf.copy() if on_device and info.donated else leaf if on_device else jax.device_put(leaf)

    owned = jax.block_until_ready(jax.tree.map(own, compiled.args_info[0], args))
    before = [_memory_stats(device) for device in devices]
    try:
        jax.block_until_ready(compiled(*owned))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        notes.append("peak_bytes unknown: the execution ran out of memory")
        return None
    peaks = []
    for device, old in zip(devices, before, strict=True):
        peak = _memory_stats(device)["peak_bytes_in_use"]
        if peak > old["peak_bytes_in_use"]:
            peaks.append(peak - old["bytes_in_use"] + argument_bytes)
    if not peaks:
        notes.append("peak_bytes unknown: something earlier in this process used more; measure in a fresh process")
        return None
    return max(peaks)


def _memory_stats(device) -> Any:
    return device.memory_stats()


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else f"{_scaled(count, 1024)}B"


def _scaled(value: float, base: int) -> str:
    middle = "i" if base == 1024 else ""
    for prefix in ("", "k" if base == 1000 else "K", "M", "G", "T", "P"):
        if abs(value) < base or prefix == "P":
            break
        value /= base
    return f"{value:.0f} " if not prefix else f"{value:.2f} {prefix}{middle}"
