"""What the primitives of a JAX program are, by name: products, loops, calls, views, elementwise operations.

Every table of names in memjax is here, so that a primitive that JAX adds or renames is added in one place. The names are
those of JAX 0.10 to 0.12 (`jax.lax`, `jax.checkpoint`, `jax.custom_jvp`, Pallas, jax-triton); where versions differ, both
are here.
"""

from __future__ import annotations

import math
from typing import Any

from memjax._core.compat import bodies

# What computes.
PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
RAGGED_PRODUCTS = frozenset(("ragged_dot", "ragged_dot_general"))
KERNELS_OF_ONE_PASS = frozenset(("memjax_update",))  # of an optimizer, from codes to codes
KERNELS = frozenset(("custom_call", "ffi_call", "pallas_call", "triton_kernel_call")) | KERNELS_OF_ONE_PASS
CALLBACKS = frozenset(("pure_callback", "io_callback"))
DECOMPOSITIONS = frozenset(("cholesky", "triangular_solve", "lu", "qr", "svd", "eigh", "eig"))
COLLECTIVES = frozenset(
    (
        *("psum", "psum_invariant", "pmax", "pmin", "ppermute", "all_to_all", "psum_scatter", "reduce_scatter"),
        *("all_gather", "all_gather_invariant"),
    )
)
RANDOM = frozenset(("random_bits", "threefry2x32"))
WINDOWS = frozenset(("reduce_window", "reduce_window_sum", "select_and_scatter_add"))
ADDING_SCATTERS = frozenset(("scatter-add", "scatter_add"))
SCATTERS = ADDING_SCATTERS | {"scatter"}
REDUCTIONS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
)
# XLA:CPU makes no one kernel of these and a reduction that reads them.
BESIDE_REDUCTIONS = frozenset(("select_n", "clamp", "slice", "concatenate", "pad"))
# What XLA:CPU makes kernels of its library of: they begin with reductions and take in what is around these.
LIBRARY_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min"))
LIBRARY_POOLS = frozenset(("reduce_window_sum", "reduce_window_max"))
_LIBRARY_OPERATIONS = """
abs add add_any broadcast_in_dim ceil convert_element_type cos div dot_general erf exp expm1 floor integer_pow log log1p logistic
max min mul neg one_minus_square pow round rsqrt sign sin sqrt square sub tan tanh
"""
LIBRARY_OPERATIONS = frozenset(_LIBRARY_OPERATIONS.split())
# In a model of a compiler: its operand, in memory; that in another layout; where the largest element of each window is.
WRITTEN, COPIED, WINDOW_INDICES = "memjax_written", "memjax_copied", "memjax_window_indices"
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "select_n", "max", "min", "clamp"))
# Linear in each operand. "one_minus_square" is the derivative of tanh in JAX 0.12.
AFFINE = frozenset(("add", "sub", "mul", "add_any", "neg", "one_minus_square"))

_MORE_ELEMENTWISE = """
abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clz complex conj convert_element_type copy
copy_p cos cosh digamma div eq_to erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac imag integer_pow
is_finite le_to lgamma log log1p logistic lt_to nextafter polygamma population_count pow random_clone random_fold_in
real reduce_precision regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient tan tanh threefry2x32 xor zeta
"""
# One element of the result from one element of each operand. JAX broadcasts dimensions of size 1 here.
ELEMENTWISE = COMPARISONS | AFFINE | frozenset(_MORE_ELEMENTWISE.split())

# How errors of operands go on. After these they are about as large: derivatives are bounded, by 1 or for usual values.
_MORE_SMOOTH = """
stop_gradient reduce_precision sharding_constraint reshard select_n reduce_sum logistic tanh erf erfc sin cos atan asinh
square abs
"""
# An error in the operand becomes a factor of the result.
EXPONENTIALS = frozenset(("exp", "exp2", "expm1", "sinh", "cosh", "tan"))
# Near some operand the result, or its derivative, has no bound.
POLES = frozenset(
    (
        *("log", "log1p", "sqrt", "rsqrt", "cbrt", "acos", "acosh", "asin", "atanh", "lgamma", "digamma", "erf_inv"),
        *("pow", "rem"),
    )
)

# Elementwise operations that a compiler for CPUs does not compute twice to save a pass over memory.
_TRANSCENDENTAL = """
acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma
lgamma log log1p logistic polygamma pow rsqrt sin sinh sqrt tan tanh zeta
"""
TRANSCENDENTAL = frozenset(_TRANSCENDENTAL.split())

# What holds programs.
LOOPS = frozenset(("scan", "while", "cond"))
# Calls that only group equations, by the parameter that holds them.
PLAIN_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
# Calls with a derivative of their own: no more than calls where nothing is differentiated.
CUSTOM_CALLS = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
TRACED_CUSTOM_CALLS = frozenset(("CustomVJPTraced",))  # with JAX_CUSTOM_VJP3=1
CHECKPOINTS = frozenset(("checkpoint", "remat2", "RematTraced"))
CALLS = frozenset(("core_call", *PLAIN_CALLS, *CUSTOM_CALLS, *CHECKPOINTS))
# Calls whose operands and results are those of their one body, differentiated or not.
CALLS_OF_ONE_BODY = (CALLS - CUSTOM_CALLS.keys()) | {"shard_map", "custom_vmap_call"}

# What moves values. A view has the elements of its one operand, in the same order but for a transposition.
REPLICATIONS = frozenset(("pvary", "pcast"))
NAMES = frozenset(("name", "CheckpointName", "CheckpointNameFwd"))
RENAMING = frozenset(("reshape", "squeeze", "expand_dims"))  # of one array, whose bytes stay where they are
RESHAPES = RENAMING | {"copy"}
VIEWS = RESHAPES | {"transpose", "convert_element_type"}
BARRIER = "optimization_barrier"
ALIASES = RESHAPES | NAMES | REPLICATIONS | {BARRIER}
SOURCES = frozenset(("broadcast_in_dim", "iota"))
DECODING = frozenset(("memjax_decode",))  # of a code, in a plan: compilers do it in whatever reads the array
SLICES = frozenset(("slice", "dynamic_slice", "gather"))  # of their operand they read what they give
TRANSFERS = frozenset(("device_put",))  # between the memories of the host and of devices
WRITING = "dynamic_update_slice"  # a slice into an array, in place where nothing else reads that
MOVES = SOURCES | REPLICATIONS | frozenset(("slice", "dynamic_slice", "split", "gather", "pad", "concatenate", "rev"))
SMOOTH = AFFINE | VIEWS | MOVES | NAMES | frozenset(_MORE_SMOOTH.split())

EXPENSIVE = (
    PRODUCTS | RAGGED_PRODUCTS | KERNELS | CALLBACKS | DECOMPOSITIONS | COLLECTIVES | RANDOM | WINDOWS | LOOPS
) | {"fft", "sort"}
"""Worth keeping rather than recomputing. Everything else is bound by memory traffic and fuses."""

WHOLE_OPERANDS = (
    (EXPENSIVE - LOOPS)
    | SCATTERS
    | TRANSFERS
    | {COPIED, WINDOW_INDICES, "reduce_window_max", "cumsum", "cumlogsumexp", "cummax", "top_k", "concatenate"}
)
"""A compiler writes the operands of these to memory: it fuses nothing into them."""


def expensive(eqn: Any) -> bool:
    """Whether the equation's outputs are worth keeping: it, or one inside it, does more than touch memory."""
    if eqn.primitive.name in EXPENSIVE or is_attention(eqn.primitive.name) or eqn.effects:
        return True
    return any(expensive(inner) for body in bodies(eqn) for inner in body.eqns)


def is_attention(name: str) -> bool:
    """Whether a primitive is a kernel of attention: cuDNN's, forwards or backwards."""
    return "dot_product_attention" in name


def flops_of_product(eqn: Any) -> float:
    """The FLOPs of one matrix product or convolution; of anything else none."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / features
    return 0.0
