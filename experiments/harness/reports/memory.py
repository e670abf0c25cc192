"""What training takes in memory, this run beside its alternatives, compiled at the same shapes."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

import memjax
from experiments.harness import files
from experiments.harness.errors import ExperimentError

_NUMBERS = ("temp_bytes", "argument_bytes", "compile_seconds")


def quick_compile() -> dict:
    """Compiler options for programs that run once or never.

    Buffers are assigned before machine code is made, which takes longest on a CPU: without optimising it,
    a DenseNet-264 with everything kept compiles in 60 instead of 106 s, to the same temporary memory.
    """
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def measure(step: Callable, *args) -> memjax.Measurement:
    """`memjax.measure` of a training step, compiled with the options of training but for speed."""
    return memjax.measure(step, *args, compiler_options=options_for_memory())


def options_for_memory() -> dict:
    """Compiler options with the memory of those of training, for programs that never run."""
    return memjax.remat_compiler_options() | quick_compile() | _simple_fusions()


@functools.cache
def _simple_fusions() -> dict:
    """An option with which XLA:CPU compiles in a third of the time, to the same temporary memory, in versions that have it."""
    option = {"xla_cpu_use_fusion_emitters": False}
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=option).lower(jax.ShapeDtypeStruct((), "float32")).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return option


def placed(tree, shardings):
    """Shapes and dtypes of a tree of arrays, as they are with `shardings`: one for all, or a tree that begins the same."""
    with_sharding = lambda sharding, part: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
    )
    return jax.tree.map(with_sharding, shardings, tree)


def save(path: Path, measurements: Mapping[str, memjax.Measurement]) -> None:
    files.write_text(path, json.dumps({name: m.to_dict() for name, m in measurements.items()}, indent=2) + "\n")


def load(path: Path) -> dict[str, dict]:
    """Raises ExperimentError if the file is damaged."""
    if not path.exists():
        return {}
    fix = "delete it, or have it made again with --resume"
    found = files.read_json(path, dict, fix)
    for name, m in found.items():
        if not isinstance(m, dict) or not all(type(m.get(f)) in (int, float) and m[f] > 0 for f in _NUMBERS):
            raise ExperimentError(f"{path} is damaged ({name}): {fix}")
    return found
