"""What a function costs in memory, compute and compile time, mostly without running it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from memjax._core import check
from memjax._core.clear_errors import option_errors
from memjax._core.platforms import traced_for_arguments
from memjax._measurement import Measurement
from memjax._program import Program, gradient, of_jax, traced

_BACKENDS = ("cpu", "gpu", "tpu", "cuda", "rocm")


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

    Raises:
      ValueError: `backend` is no name of a backend.
    """
    check.choice("backend", backend, (None, *dict.fromkeys((*_BACKENDS, jax.default_backend()))))
    backend = jax.default_backend() if backend is None else backend
    needed = backend == "cpu" and jax.__version_info__ < (0, 11)
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if needed else {}


@traced_for_arguments
def measure(
    fn: Callable,
    *args: Any,
    compiler_options: dict[str, Any] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Measurement:
    """Bytes, FLOPs and compile time of `fn(*args, **kwargs)`.

    `measure(loss, params, batch)`, `measure(jax.value_and_grad(loss), params, batch)` and
    `measure(train_step, state, batch)` report the same residual bytes as long as they differentiate the same
    thing: if `fn` contains a backward pass, that one is measured; if not, its reverse-mode derivative with
    respect to all float arrays in its arguments is. If its result is a scalar float, or a tuple that begins with
    one, that is the loss and the rest is auxiliary, as with `jax.grad(..., has_aux=True)`. The other figures
    are always those of `fn` itself: for the temporary memory of training, measure a function that computes
    gradients.

    Flax NNX objects (modules, optimizers, `nnx.Rngs`) can be arguments. What `fn` changes in them in place
    belongs to the program, as outputs; the objects themselves are not changed. A function under `nnx.jit`
    returns whatever state `nnx.jit` makes it return, so its `output_bytes` can include unchanged variables.

    Nothing is executed, except once if all arguments are arrays and their devices keep memory statistics
    (GPUs and TPUs do, CPUs do not): that gives `peak_bytes`. Donated arguments are copied first, so `args`
    stay valid. A device's peak counter never goes down, so the figure is only known if this execution reached
    a new peak, and is then exact up to the allocator's rounding: for true figures of several functions,
    measure each in a process of its own. Side effects of `fn` (callbacks, prints) happen in that execution.

    Args:
      fn: a function, under `jax.jit`, `nnx.jit` or neither; an NNX module, a Linen module that is bound to its
        variables, a method of either, or another callable pytree, whose arrays are then arguments too. The
        shardings, donation and compiler options of a jitted function are kept.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s (also mixed), of any dtype, typed PRNG keys
        included. Python's int, float and complex are scalar arguments, as for `jax.jit`: `static_argnums` or
        `functools.partial` keep one that `fn` needs as a value. Other leaves (texts, functions, configurations, True and
        False, modules of Linen) stay as they are if `fn` is not jitted; if it is, they have to be among its static arguments.
      compiler_options: passed to the compiler. None means `remat_compiler_options()`: on a CPU
        rematerialisation may save nothing without (see there), and a program compiled by plain `jax.jit`
        can then need more memory than is reported here.
      static_argnums, static_argnames: as for `jax.jit`, where `fn` is not jitted: arguments whose values it needs, such as a
        number of layers or a dict of settings. A jitted function, under `memjax.jit` too, keeps those that it has.
      **kwargs: like `args`.

    Raises:
      TypeError: `fn` is not a function, or JAX cannot trace it with these arguments.
      ValueError: the compiler does not know an option.
    """
    check.compiler_options(compiler_options)
    notes: list[str] = []

    start = time.perf_counter()
    program = traced(
        "measure", fn, args, kwargs, {"static_argnums": static_argnums, "static_argnames": static_argnames}
    )
    needed = remat_compiler_options(program.device.platform)
    options = needed if compiler_options is None else dict(compiler_options)
    lowered = program.stage.lower()
    with option_errors(options):
        compiled = lowered.compile(compiler_options=options or None)
    compile_seconds = time.perf_counter() - start

    executable = of_jax(compiled)
    found = gradient(program, program.float_arrays)
    if isinstance(found, str):
        notes.append(f"residual bytes unknown: {found}")
    held = None if isinstance(found, str) else found.residuals
    notes += program.notes
    memory = executable.memory_analysis()
    if memory is None:
        notes.append("compiled bytes unknown: the backend gives no memory analysis")
    argument_bytes = None if memory is None else memory.argument_size_in_bytes
    return Measurement(
        residual_bytes=None if held is None else held.device.nbytes,
        offloaded_bytes=None if held is None else held.host.nbytes,
        temp_bytes=None if memory is None else memory.temp_size_in_bytes,
        argument_bytes=argument_bytes,
        output_bytes=None if memory is None else memory.output_size_in_bytes,
        flops=(executable.cost_analysis() or {}).get("flops"),
        compile_seconds=compile_seconds,
        peak_bytes=_runtime_peak(compiled, program, argument_bytes, notes),
        notes=tuple(notes),
    )


def _runtime_peak(compiled, program: Program, argument_bytes: int | None, notes: list[str]) -> int | None:
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in program.parts.arrays):
        notes.append("peak_bytes unknown: abstract arguments are not executed")
        return None
    executable = of_jax(compiled)
    shardings = jax.tree.leaves((executable.input_shardings, executable.output_shardings))
    devices = sorted(shardings[0].addressable_devices if shardings else (), key=lambda device: device.id)
    if argument_bytes is None or not devices or any(_memory_stats(device) is None for device in devices):
        notes.append("peak_bytes unknown: the device keeps no memory statistics")
        return None
    inputs = _own_inputs(compiled, program)
    if inputs is None:
        notes.append("peak_bytes unknown: fn has arguments that are not among those given here, or are static")
        return None
    args, kwargs = jax.block_until_ready(inputs)
    before = [_memory_stats(device) for device in devices]
    try:
        jax.block_until_ready(compiled(*args, **kwargs))
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


def _own_inputs(compiled, program: Program) -> tuple[tuple, dict[str, Any]] | None:
    """Arguments that one execution may donate and update; None if the program takes others."""

    def copied(donated: bool, leaf: Any) -> Any:
        # The baseline counts what lies on the device already, so host arrays have to be there too.
        on_device = isinstance(leaf, jax.Array)
        return leaf.copy() if on_device and donated else leaf if on_device else jax.device_put(leaf)

    executable = of_jax(compiled)
    args, kwargs, parts = program.args, program.kwargs, program.parts
    if executable is compiled:
        if executable.in_tree != jax.tree.structure((args, kwargs)):
            return None
        return jax.tree.map(lambda info, leaf: copied(info.donated, leaf), executable.args_info, (args, kwargs))
    infos = jax.tree.leaves(executable.args_info)
    if len(infos) != len(parts.arrays):
        return None
    # Which array a variable of Flax NNX becomes is not told, so one that is donated means a copy of all.
    donated = any(info.donated for info in infos)
    return parts.rebuild([copied(donated, array) for array in parts.arrays])[:2]


def _memory_stats(device) -> Any:
    return device.memory_stats()
