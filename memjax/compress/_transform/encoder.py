"""Encodes each array during the forward pass, and lets the equations that read it wait for its code.

They wait behind an optimisation barrier: otherwise a compiler may compute all codes at the end of the forward pass, when all
arrays are live at once.

An elementwise code of a batch norm's input is fused into the normalisation. The codec measures its ranges first, as the batch
norm computes its deviations. The normalisation waits for both, and only matrix products, convolutions and calls after it wait for
the code. If a product reads the output of the ReLU that follows the normalisation, the ReLU's mask is computed from that output
and packed in a separate pass.

A codec that encodes in one read of the array is not fused, since fusion saves it nothing. If it offers `encode_with_sums`, it
also computes the batch norm's sums in that read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from memjax._core.backward.derivatives import without_derivative
from memjax._core.barriers import barrier, joint_barrier
from memjax._core.compat import bodies
from memjax._core.program.dataflow import Walk, is_literal, variables
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import PRODUCTS
from memjax.compress._codecs.codec import Mask
from memjax.compress._codecs.mask_kernel import encode_positive
from memjax.compress._transform.array_codecs import ArrayCodecs, is_fused
from memjax.compress._transform.keep.choose import Keep

FIRST_ORDER = (
    "memjax.compressed supports first derivatives in reverse mode only: what it saves is rounded. "
    "Differentiate twice without it."
)


class Encoder:
    """Encodes the arrays of one forward pass. In its methods `env` has the values of the variables computed so far.

    `codes` has the code of each variable encoded so far.
    """

    def __init__(self, program: Program, keep: Keep, codecs: ArrayCodecs):
        self.codes: dict[Any, Any] = {}
        self._program, self._keep = program, keep
        self._codecs = dict(zip(keep.encoded, codecs.each(keep.roles), strict=True))
        packed = _variables_of_packing(program, [var for var in keep.masks if var not in keep.outputs])
        self._fused = {
            var
            for var, codec in self._codecs.items()
            if var in keep.scales and codec.measured and var not in packed and not codec.reads_once(var.aval)
        }
        reading = program.flow.consumers
        self._sums = {
            var: sums
            for var, codec in self._codecs.items()
            if codec.encode_with_sums and codec.reads_once(var.aval) and (sums := _channel_sums(var, reading))
        }
        self._unread: dict[Any, set[Any]] = {}  # by array with a code that nothing waits for yet, what should
        self._arrays_by_need: dict[Any, list[Any]] = {}
        for var in (*keep.encoded, *keep.masks):
            for needed in self._needs(var):
                self._arrays_by_need.setdefault(needed, []).append(var)

    def after(self, computed: Iterable[Any], env: dict[Any, Any]) -> None:
        """Encode the arrays that need these variables, once all their needs are computed. May compute other variables, too."""
        for array in dict.fromkeys(array for var in computed for array in self._arrays_by_need.get(var, [])):
            if array not in self.codes and all(needed in env for needed in self._needs(array)):
                self._encode(array, env)

    def before(self, eqn: Any, env: dict[Any, Any]) -> None:
        """Let an equation that is about to run wait for the codes of the arrays that its operands are computed from."""
        if self._unread and _is_own_pass(eqn):
            self._wait(eqn.invars, env)

    def finish(self, outs: Sequence[Any], env: dict[Any, Any]) -> None:
        """Let the outputs wait for all codes that nothing has waited for."""
        self._unread = {array: set(variables(outs)) for array in self._unread}
        self._wait(outs, env)

    def _needs(self, array: Any) -> list[Any]:
        """The variables that encoding the array needs: itself, and the deviations that its code depends on."""
        if array in self._keep.outputs:
            return [self._keep.outputs[array]]
        if array not in self._keep.scales or not (array in self._fused or self._codecs[array].scaled):
            return [array]
        return [array, self._keep.scales[array].variable]

    def _encode(self, array: Any, env: dict[Any, Any]) -> None:
        if (out := self._keep.outputs.get(array)) is not None:
            value = barrier(env[out])  # which the product that reads it needs in memory, too
            env[out], self.codes[array] = barrier((value, encode_positive(value)))
            return
        if array not in self._codecs:
            env[array], self.codes[array] = barrier((env[array], Mask().encode(env[array])))
            return
        codec, x = self._codecs[array], without_derivative(env[array], FIRST_ORDER)
        if array in self._fused:
            scale = self._keep.scales[array].variable
            env[scale], codec = joint_barrier((env[scale], codec.measured(env[array])))
        if array in self._fused or is_fused(codec):
            self.codes[array] = codec.encode(x)
            self._unread[array] = self._before_passes(array)
            return
        if array in self._sums:
            kept = env[array], *codec.encode_with_sums(x)
            env[array], self.codes[array], sums = barrier(kept)
            env.update({var: sums[power].astype(var.aval.dtype) for var, power in self._sums[array].items()})
            return
        encode = codec.encode
        if array in self._keep.scales and codec.scaled:
            scale = self._keep.scales[array]
            root = env[scale.variable].reshape(-1)
            encode = codec.scaled(root if scale.is_deviation else 1 / root).encode
        env[array], self.codes[array] = joint_barrier((env[array], encode(x)))

    def _before_passes(self, array: Any) -> set[Any]:
        """The array, and the variables computed from it before products and calls."""
        return self._program.flow.depending([array], lambda eqn: not _is_own_pass(eqn))

    def _wait(self, operands: Sequence[Any], env: dict[Any, Any]) -> None:
        """Let the largest operand wait for the codes of the arrays that the operands are computed from."""
        read = variables(operands)
        encoded = [array for array, computed in self._unread.items() if not computed.isdisjoint(read)]
        if encoded:
            var = max(read, key=lambda var: var.aval.size)
            env[var], codes = joint_barrier((env[var], [self.codes[array] for array in encoded]))
            self.codes.update(zip(encoded, codes, strict=True))
            for array in encoded:
                del self._unread[array]


def _variables_of_packing(program: Program, masks: Iterable[Any]) -> set[Any]:
    """Variables computed in a pass that packs bits: `masks`, operands of integer sums, and the variables they are computed from.

    Codes are not fused into such a pass: on GPUs XLA compiles both into one slow kernel.
    """
    producer = program.flow.makers
    sums = [eqn for eqn in program.eqns if eqn.primitive.name == "reduce_sum"]
    integers = [eqn for eqn in sums if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer)]
    walk, packed = Walk([*masks, *(atom for eqn in integers for atom in eqn.invars)]), set[Any]()
    for var in walk:
        packed.add(var)
        eqn = producer.get(var)
        if eqn is not None and not _is_own_pass(eqn) and eqn.primitive is not lax.optimization_barrier_p:
            walk.add(atom for atom in eqn.invars if atom.aval.size * 16 > var.aval.size)
    return packed


def _is_own_pass(eqn: Any) -> bool:
    """Whether the equation is a product, call or loop, which compilers hardly ever fuse with its consumers."""
    return eqn.primitive.name in PRODUCTS or bool(bodies(eqn))


def _channel_sums(root: Any, consumers: dict[Any, list[Any]]) -> dict[Any, int]:
    """The variables that are sums of `root` over all axes but the last: 0 for sums of its values, 1 for those of squares."""
    wide = [root] if root.aval.dtype == jnp.float32 else []
    for eqn in consumers.get(root, []):
        if eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == jnp.float32:
            wide.append(eqn.outvars[0])
    squares = [eqn.outvars[0] for var in wide for eqn in consumers.get(var, []) if _is_square(eqn)]
    axes = tuple(range(root.aval.ndim - 1))
    found = {}
    for power, summed in enumerate((wide, squares)):
        for eqn in (eqn for var in summed for eqn in consumers.get(var, [])):
            if eqn.primitive.name == "reduce_sum" and tuple(eqn.params["axes"]) == axes:
                found[eqn.outvars[0]] = power
    return found


def _is_square(eqn: Any) -> bool:
    name, operands = eqn.primitive.name, eqn.invars
    if name == "mul":
        return not any(map(is_literal, operands)) and operands[0] is operands[1]
    return name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)
