"""memjax: training that fits in memory, with composable transforms for JAX and Flax.

Functions:
  jit: a training step within the memory of a device: `jax.jit`, and it fits.
  explain: where the activation memory of a training step goes, module by module, and what would save it.
  explain_peak: why a plan takes other bytes than were predicted, array by array.
  plan: what a function keeps and what it computes again, so that its step fits a budget of memory in the least time.
  planned: a function that is differentiated by such a plan.
  measure: bytes, FLOPs and compile time of a function, and what it holds for its backward pass.
  compressed: a function or Flax module whose saved activations go through a lossy code.
  linear_cross_entropy: the loss of a language model without its logits in memory.
  remat_compiler_options: compiler options without which a CPU with JAX 0.10 saves nothing by recomputing.

Classes:
  Explanation: what `explain` returns.
  Measurement: what `measure` returns.
  PeakComparison: what `explain_peak` returns.
  Plan: what `plan` returns.
  StepPlan: the plan of a step under `jit`.

Packages:
  remat: recomputation by budget and by name: checkpoint, scan, chain, dense blocks, RNNs.
  compress: codecs, bounds that follow training, steps that survive an overflow.
  shard: tensor parallelism that keeps tokens where they are, inside `jax.shard_map`.

Constants:
  __version__: the version of the installed package.
"""

import importlib.metadata

from memjax import compress, remat, shard
from memjax._explain import Explanation, PeakComparison, explain
from memjax._jit.jit import jit
from memjax._jit.step_plan import StepPlan
from memjax._linear_cross_entropy import linear_cross_entropy
from memjax._measure import measure, remat_compiler_options
from memjax._measurement import Measurement
from memjax._plan.api import explain_peak, plan, planned
from memjax._plan.result import Plan
from memjax.compress import compressed

__all__ = [
    "Explanation",
    "Measurement",
    "PeakComparison",
    "Plan",
    "StepPlan",
    "__version__",
    "compress",
    "compressed",
    "explain",
    "explain_peak",
    "jit",
    "linear_cross_entropy",
    "measure",
    "plan",
    "planned",
    "remat",
    "remat_compiler_options",
    "shard",
]

try:
    __version__ = importlib.metadata.version("memjax")
except importlib.metadata.PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "unknown"
del importlib
