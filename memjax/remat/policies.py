"""Policies for checkpointed functions: which values to save or to offload, by name, the rest recomputed.

    from memjax.remat import checkpoint, policies

    block = checkpoint(block, policy=policies.save(policies.CONV_OUTPUT))
    block = checkpoint(block, policy=policies.save("attention_output") | policies.offload("mlp_hidden"))

A value has a name if the model gave it one, `y = jax.ad_checkpoint.checkpoint_name(y, "conv_output")`, which
changes nothing else. The constants below are the names used throughout this library and its experiments; any
other string does as well. What a checkpointed function keeps between forward and backward is then

    its inputs + the bytes of the values with a saved name (device) + those with an offloaded name (host)

and everything else is recomputed. `memjax.remat.checkpoint` warns of a name that no value has, where
`jax.checkpoint` stays silent and recomputes everything.
"""

from memjax._core import check
from memjax._core.program.name_policy import NamePolicy

__all__ = [
    "ATTENTION_OUTPUT",
    "BLOCK_INPUT",
    "CONV_OUTPUT",
    "DENSE_FEATURES",
    "MLP_HIDDEN",
    "NamePolicy",
    "offload",
    "save",
]

CONV_OUTPUT = "conv_output"
"""What a convolution returns, before normalisation."""
DENSE_FEATURES = "dense_features"
"""The features that one layer of a dense block adds."""
BLOCK_INPUT = "block_input"
"""What enters a residual, dense or transformer block."""
ATTENTION_OUTPUT = "attention_output"
"""What attention returns, before its output projection."""
MLP_HIDDEN = "mlp_hidden"
"""The widest activation of an MLP, before its nonlinearity."""


def save(*names: str) -> NamePolicy:
    """Keep values with these names in device memory, recompute the rest.

    Raises:
      TypeError: a name is not a string.
      ValueError: there is no name, or an empty one.
    """
    return NamePolicy(saved=_checked("save", names))


def offload(*names: str) -> NamePolicy:
    """Keep values with these names in host memory until the backward pass needs them, recompute the rest.

    The host copy lies in the backend's `pinned_host` memory, which GPUs and TPUs have, and CPUs have in name:
    there the copy is a second one in the same RAM, and saves nothing. Moving `n` bytes out and back takes
    `2 n / bandwidth` of the link to the host, beside compute where the compiler arranges it.

    On GPUs offload from layers that run in a `jax.lax.scan`: the copy then ends with its iteration, and the
    device memory falls by the bytes offloaded. For layers unrolled in Python, XLA:GPU may put the copies off
    until the backward pass needs them back, which saves nothing and can need more.
    `memjax.measure(...).temp_bytes` tells.

    XLA:GPU as of JAX 0.11.0 read what a scan's layers had offloaded in the wrong order in the backward pass, without a
    word (XLA 46231). With JAX 0.11.2 on an H200, gradients are those without offload in `lax.scan`, forwards and reversed,
    and in unrolled layers; in scans of scans and with `unroll=2` XLA stops with an internal error while compiling, and no
    wrong gradient was seen. `tests/remat/scan/test_offload_gpu.py` compares them: run it before trusting another version.

    Raises:
      TypeError: a name is not a string.
      ValueError: there is no name, or an empty one.
    """
    return NamePolicy(offloaded=_checked("offload", names))


def _checked(function: str, names: tuple[str, ...]) -> frozenset[str]:
    example = f"{function}('conv_output', 'mlp_hidden')"
    for name in names:
        if not isinstance(name, str):
            raise check.fail(TypeError, "names", "strings", name, example)
        if not name:
            raise check.fail(ValueError, "names", "strings that are not empty", name, example)
    if not names:
        raise ValueError(f"names must be at least one, got none: {example}, or no policy to recompute everything")
    return frozenset(names)
