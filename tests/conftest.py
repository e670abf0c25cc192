"""Eight simulated CPU devices, strict dtype promotion, float64 available on request.

The environment is set before JAX is imported: device count and barrier handling cannot be changed later.
"""

import atexit
import gc
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

# Nearly all of the time goes into compiling programs that run once: leave LLVM's optimisations out. What XLA itself
# does, and with it every memory figure, stays as it is.
_FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
# With a CPU's instructions for 16-bit floats, two programs that compute the same round it otherwise.
_FLAGS.append("--xla_cpu_max_isa=AVX512")
# Programs are small: dividing them for several threads takes longer than it saves.
_FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")
# XLA:CPU ends the process where a simulated device comes to a collective a minute after the first one, 20 seconds until it
# warns and then 40, which a busy machine can take. There is a thread for each device, so that all of them do come.
_FLAGS.append("--xla_cpu_collective_call_terminate_timeout_seconds=600")
if importlib.metadata.version("jax").startswith("0.10."):
    # The newer of two generators of code takes twice as long. Later versions have no other.
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    if shutil.which("nvidia-smi") is None:
        # With JAX 0.10 XLA:CPU drops optimisation barriers and then merges recomputed values with the originals. Later
        # ones, and XLA:GPU, cannot do without this pass.
        _FLAGS.append("--xla_disable_hlo_passes=cse_barrier_expander")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()
os.environ.setdefault("MPLBACKEND", "agg")
# After each product NumPy's BLAS keeps its threads spinning, on cores that the other test process needs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Several test processes share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # A program is compiled once, whichever test process, or process that a test starts, needs it first.
    _CACHE = tempfile.mkdtemp(prefix="memjax-tests-")
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tracing makes many objects, and what was traced before stays in JAX's caches: Python would look through all of it again
# and again. Once after each file is enough, and then at what this file made: what outlives its file stays.
gc.disable()


def pytest_collection_finish():
    gc.freeze()  # all modules of tests, and what they import


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_report_header():
    return "All tests take about ten minutes on two cores; those marked smoke take one."


# Files that take the longest, in this order. Begun last, one of them would leave the other process without work.
_LONG = (
    "contract/test_contract",
    "test_docs",
    "jit/test_jit",
    "experiments/test_llama",
    "plan/test_tile",
    "experiments/test_metp_experiment",
    "compress/error_bounded/test_kernels",
    "experiments/harness/test_experiment_resume",
    "experiments/test_compressed_training",
    "compress/training/test_adaptive",
    "jit/test_updates",
    "plan/test_fission",
    "experiments/harness/test_experiment_training",
    "plan/test_compress",
    "jit/test_refused",
    "remat/flax/test_rnn",
    "experiments/test_paired",
    "plan/test_planned",
    "remat/scan/test_scan_memory",
)
_ORDER = {Path(__file__).parent / f"{name}.py": place for place, name in enumerate(_LONG)}
assert all(path.exists() for path in _ORDER), "_LONG must name files of tests: follow them where they went"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _ORDER.get(item.path, len(_ORDER)))
    if jax.default_backend() == "gpu":
        return
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield
