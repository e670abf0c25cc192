"""What training takes in memory, this run beside its alternatives, compiled at the same shapes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from jax.sharding import Sharding

import memjax

# How fast the program would run does not matter here, only its buffers. They are assigned before machine code
# is made, and on a CPU that is what takes long: 71 instead of 106 s for a DenseNet-264 with everything kept.
_QUICK_CPU_COMPILE = {"xla_backend_optimization_level": 0}


def measure(step: Callable, *args) -> memjax.Measurement:
    """`memjax.measure` of a training step, compiled with the options of training but for speed."""
    quick = _QUICK_CPU_COMPILE if jax.default_backend() == "cpu" else {}
    return memjax.measure(step, *args, compiler_options=memjax.remat_compiler_options() | quick)


def placed(tree, sharding: Sharding):
    """Shapes and dtypes of a tree of arrays, as they are with `sharding`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def save(path: Path, measurements: Mapping[str, memjax.Measurement]) -> None:
    path.write_text(json.dumps({name: m.to_dict() for name, m in measurements.items()}, indent=2) + "\n")


def load(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text()) if path.exists() else {}
