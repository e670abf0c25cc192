"""What training takes in memory, this run beside its alternatives, compiled at the same shapes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from jax.sharding import Sharding

import memjax


def quick_compile() -> dict:
    """Compiler options for programs that run once or never.

    Buffers are assigned before machine code is made, which takes longest on a CPU: without optimising it,
    a DenseNet-264 with everything kept compiles in 60 instead of 106 s, to the same temporary memory.
    """
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def measure(step: Callable, *args) -> memjax.Measurement:
    """`memjax.measure` of a training step, compiled with the options of training but for speed."""
    return memjax.measure(step, *args, compiler_options=memjax.remat_compiler_options() | quick_compile())


def placed(tree, sharding: Sharding):
    """Shapes and dtypes of a tree of arrays, as they are with `sharding`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def save(path: Path, measurements: Mapping[str, memjax.Measurement]) -> None:
    path.write_text(json.dumps({name: m.to_dict() for name, m in measurements.items()}, indent=2) + "\n")


def load(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text()) if path.exists() else {}
