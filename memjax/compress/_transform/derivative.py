"""The derivative of a flat function, its saved arrays passing through a codec.

The forward pass runs what `jax.vjp` does and encodes each saved array; the backward pass runs the pullback, equation by
equation, and decodes an array when an equation first reads it: behind a barrier on the cotangent that the equation
reads besides, so that the compiler cannot begin earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxprs_in_params

from memjax._core.arrays import is_float, zeros
from memjax._core.compat import scope
from memjax._core.derivatives import without_derivative
from memjax._core.jaxpr import bind, evaluate, is_literal, read, trace
from memjax._core.lists import drop, merge, pick
from memjax._core.primitives import PRODUCTS
from memjax.compress._codecs.codec import Codec, Mask
from memjax.compress._training.layers import AnyCodec, Layers, Recorder, Statistics
from memjax.compress._transform.keep import Which, choose
from memjax.compress._transform.max_pool import max_pool
from memjax.compress._transform.overflow import warn_of_overflow
from memjax.compress._transform.pool_first import evaluate_pools_first
from memjax.compress._transform.readers import Reader, only_in_gradients, readers
from memjax.compress._transform.statistics import Collector

_REPLACE = {"reduce_window_max": max_pool}
Arrays = list[Any]


@jax.tree_util.register_static
class Derivative:
    """Of `jaxpr` with respect to the inputs in `wanted`.

    Args:
      jaxpr: of the constants and inputs together.
      outs: which of its outputs; the others are inputs.
      types: of its inputs.
      wanted: which inputs to differentiate for.
      lasting: which inputs live until the backward pass anyway.
      which: of the saved arrays to encode.
      zeros: whether the codec keeps zeros, and makes no others.
      code_nbytes: see `choose`.
      names: of its inputs.
      axes: sizes of the named axes that its collectives run over.
    """

    def __init__(
        self,
        jaxpr: Any,
        outs: Sequence[bool],
        types: Sequence[Any],
        wanted: Sequence[bool],
        lasting: Sequence[bool],
        which: Which,
        zeros: bool,
        code_nbytes: Callable[[Any], int] | None,
        names: Sequence[str],
        axes: dict[str, int],
    ):
        self._axes = axes
        self.wanted = wanted
        self._names = pick(names, wanted)
        self.out_types = pick([var.aval for var in jaxpr.outvars], outs)
        self._out_float = [is_float(aval) for aval in self.out_types]
        n_consts = len(jaxpr.constvars)
        trees = []

        with_calls = lambda *inputs: evaluate(jaxpr, inputs[:n_consts], inputs[n_consts:], differentiable=True)
        flat = trace(with_calls, types, axes)

        def with_residuals(*inputs):
            def floats(chosen):
                full = merge(chosen, drop(inputs, wanted), wanted)
                every = evaluate_pools_first(flat.jaxpr, flat.consts, full, replace=_REPLACE)
                made = pick(every, outs)
                return pick(made, self._out_float), drop(made, self._out_float)

            chosen_outs, pullback, rest = jax.vjp(floats, pick(inputs, wanted), has_aux=True)
            residuals, tree = jax.tree.flatten(pullback)
            trees.append(tree)
            return [*merge(chosen_outs, rest, self._out_float), *residuals]

        traced = trace(with_residuals, types, axes)
        self._tree = trees[0]
        closed = _calls_in_place(traced, axes)
        self._jaxpr, self._consts = closed.jaxpr, closed.consts
        n_outs = len(self.out_types)
        self._outs, self._residuals = self._jaxpr.outvars[:n_outs], self._jaxpr.outvars[n_outs:]
        self._producer = {out: eqn for eqn in self._jaxpr.eqns for out in eqn.outvars}
        self.keep = choose(self._jaxpr, self._residuals, pick(self._jaxpr.invars, lasting), which, zeros, code_nbytes)
        self._packed = _ancestors_of_bits(self._jaxpr, self.keep.masks, self._producer)
        # Now, not when cotangents arrive: a `jax.vmap` around has taken its axis name away by then.
        self._cotangent_types = [_cotangent_type(aval) for aval in pick(self.out_types, self._out_float)]
        self._pullback = self._trace_pullback(self._cotangent_types)

    def _name(self, var: Any) -> str:
        """What an encoded array is called in messages: where it is made, and its type."""
        where = scope(self._producer[var]) if var in self._producer else "an input"
        return f"{where or self._producer[var].primitive.name} {var.aval.str_short()}"

    @property
    def scopes(self) -> list[str]:
        """The named scopes of the function."""
        return sorted({scope(eqn) for eqn in self._jaxpr.eqns} - {""})

    def forward(self, inputs: Arrays, codec: AnyCodec) -> tuple[Arrays, Any]:
        """The outputs, and what is kept for `backward`."""
        if isinstance(codec, Layers | Recorder):
            codec.check(len(self.keep.encoded))
        env = dict(zip([*self._jaxpr.constvars, *self._jaxpr.invars], [*self._consts, *inputs], strict=True))
        codes: dict[Any, Any] = {}
        beside: dict[Any, set[Any]] = {}  # by what has a code that nothing waits for yet, what should
        self._encode_ready(codec, env, codes, beside)
        for eqn in self._jaxpr.eqns:
            if _is_pass(eqn):
                _wait(eqn.invars, env, codes, beside)
            env.update(zip(eqn.outvars, bind(eqn, read(env, eqn.invars)), strict=True))
            self._encode_ready(codec, env, codes, beside)
        beside = {var: {out for out in self._outs if not is_literal(out)} for var in beside}
        _wait(self._outs, env, codes, beside)
        if not isinstance(codec, Layers | Recorder):  # whose overflows are counted, and lead to another try
            warn_of_overflow([self._name(var) for var in self.keep.encoded], [codes[var] for var in self.keep.encoded])
        kept = [codes[var] for var in self.keep.encoded], [codes[var] for var in self.keep.masks]
        return read(env, self._outs), (read(env, self.keep.whole), *kept)

    def _encode_ready(
        self, codec: AnyCodec, env: dict[Any, Any], codes: dict[Any, Any], beside: dict[Any, set[Any]]
    ) -> None:
        """Encode what has just been computed. What reads it waits for its code, or all codes might be made at the end.

        Of what a batch norm reads, a code in which values are by themselves but for what was `measured` of all of them is made
        in the pass in which the batch norm normalises: that waits for what is measured, and only products and calls that
        read what comes of it for the code. Not where that pass packs masks: on GPUs XLA makes a slow one of both.
        """
        for i, var in enumerate(self.keep.encoded):
            if var in codes or var not in env:
                continue
            own, scale = _own(codec, i), self.keep.scales.get(var)
            is_beside = hasattr(own, "measured") and var not in self._packed
            if scale is not None and (is_beside or hasattr(own, "scaled")):
                if scale[0] not in env:
                    continue
                if is_beside:
                    env[scale[0]], measured = lax.optimization_barrier((env[scale[0]], own.measured(env[var])))  # type: ignore[attr-defined]
                    codes[var] = _encode(measured, env[var])
                    beside[var] = _computed_of(var, self._jaxpr)
                    continue
                own = own.scaled(_deviation(env[scale[0]], scale[1]))  # type: ignore[attr-defined]
            env[var], codes[var] = lax.optimization_barrier((env[var], _encode(own, env[var])))
        for var in self.keep.masks:
            if var in env and var not in codes:
                env[var], codes[var] = lax.optimization_barrier((env[var], Mask().encode(env[var])))

    def backward(self, kept: Any, codec: AnyCodec, cotangents: Arrays) -> tuple[Arrays, Statistics | None]:
        """Cotangents of the inputs in `wanted`, and what was found out on the way, if the codec has a place for it."""
        whole, codes, masks = kept
        cotangents = [_instantiate(ct) for ct in pick(cotangents, self._out_float)]
        given = [_definite(jax.typeof(ct)) for ct in cotangents]
        closed = self._pullback if given == self._cotangent_types else self._trace_pullback(given)

        known = dict(zip(self._jaxpr.constvars, self._consts, strict=True))
        known |= dict(zip(self.keep.whole, whole, strict=True))
        n = len(self._residuals)
        leaves = dict(zip(closed.jaxpr.invars[:n], self._residuals, strict=True))
        late = set(closed.jaxpr.invars[n:])
        origins = {leaf: self.keep.origins[var] for leaf, var in leaves.items() if var in self.keep.origins}
        without_signs = only_in_gradients(closed.jaxpr, late, origins)
        encoded = list(enumerate(zip(self.keep.encoded, codes, strict=True)))
        stored: dict[Any, Any] = {}
        for i, (var, code) in encoded:
            own = _own(codec, i)
            stored[var] = own.without_signs() if var in without_signs and hasattr(own, "without_signs") else own, code
        stored |= {var: (Mask(), code) for var, code in zip(self.keep.masks, masks, strict=True)}
        restored = _Restored(self._producer, self.keep.nonzero, known, stored)
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(closed.jaxpr.invars[n:], cotangents, strict=True))
        if not isinstance(codec, Layers | Recorder):
            return _run_late(closed.jaxpr, env, late, leaves, restored), None

        index = {var: i for i, var in enumerate(self.keep.encoded)}
        reading = readers(closed.jaxpr, late, {leaf: index[var] for leaf, var in origins.items()})
        if isinstance(codec, Recorder):
            self._record(codec, reading.values())
            return _run_late(closed.jaxpr, env, late, leaves, restored), None
        collector = Collector(codec.statistics, codec.samples, [cotangents, codes])
        for i, (var, code) in encoded:
            collector.code(i, code, var.aval.shape)

        def see(eqn, values):
            if (reader := reading.get(id(eqn))) is not None:
                x = restored(self.keep.encoded[reader.layer], lambda code: code)
                collector.cotangent(reader, values[reader.cotangent], x)

        outs = _run_late(closed.jaxpr, env, late, leaves, restored, see)
        for i, (var, _) in encoded:
            if restored.has(var):
                collector.decoded(i, restored(var, lambda code: code))
        return outs, collector.sums()

    def _trace_pullback(self, cotangents: Sequence[Any]) -> Any:
        """The program from residuals and cotangents of these types to cotangents of the inputs."""
        pullback = lambda residuals, cts: jax.tree.unflatten(self._tree, residuals)(cts)
        types = [var.aval for var in self._residuals]
        return _calls_in_place(trace(pullback, [types, list(cotangents)], self._axes), self._axes)

    def _record(self, recorder: Recorder, found: Iterable[Reader]) -> None:
        weights: list[tuple[str, ...]] = [()] * len(self.keep.encoded)
        for reader in found:
            weights[reader.layer] += (self._names[reader.weight],)
        names = [own[0] if own else f"array {i}" for i, own in enumerate(weights)]
        recorder.record(names, weights, [var.aval for var in self.keep.encoded])


def _calls_in_place(closed: Any, axes: dict[str, int]) -> Any:
    """The same program with the bodies of its calls in their place."""
    in_place = lambda *inputs: evaluate(closed.jaxpr, closed.consts, inputs, differentiable=False)
    return trace(in_place, closed.in_avals, axes)


def _cotangent_type(aval: Any) -> Any:
    """The type that the cotangent of a value of this type has."""
    return _definite(aval.to_ct_aval())


def _definite(aval: Any) -> Any:
    """The type without weakness, which says nothing about an array."""
    return aval.update(weak_type=False)


def _ancestors_of_bits(jaxpr: Any, masks: Iterable[Any], producer: dict[Any, Any]) -> set[Any]:
    """`masks`, and what integers in `jaxpr` are sums of, as packed bits are; and what these are computed of in one pass."""
    pending, found = list(masks), set[Any]()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reduce_sum" and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer):
            pending += eqn.invars
    while pending:
        var = pending.pop()
        if is_literal(var) or var in found:
            continue
        found.add(var)
        eqn = producer.get(var)
        if eqn is not None and not _is_pass(eqn) and eqn.primitive is not lax.optimization_barrier_p:
            pending += [atom for atom in eqn.invars if atom.aval.size * 16 > var.aval.size]
    return found


def _is_pass(eqn: Any) -> bool:
    """Whether a compiler fuses it with nothing, or next to nothing, that comes after it."""
    return eqn.primitive.name in PRODUCTS or any(True for _ in jaxprs_in_params(eqn.params))


def _computed_of(var: Any, jaxpr: Any) -> set[Any]:
    """`var`, and what is computed of it before products and calls."""
    found = {var}
    for eqn in jaxpr.eqns:
        if not _is_pass(eqn) and any(atom in found for atom in eqn.invars if not is_literal(atom)):
            found.update(eqn.outvars)
    return found


def _wait(operands: Sequence[Any], env: dict[Any, Any], codes: dict[Any, Any], beside: dict[Any, set[Any]]) -> None:
    """The largest of `operands`, variables that are about to be read, waits for codes of what they are computed of."""
    variables = [atom for atom in operands if not is_literal(atom)]
    made = [own for own, computed in beside.items() if not computed.isdisjoint(variables)]
    if made:
        var = max(variables, key=lambda var: var.aval.size)
        env[var], done = lax.optimization_barrier((env[var], [codes[own] for own in made]))
        codes.update(zip(made, done, strict=True))
        for own in made:
            del beside[own]


def _own(codec: AnyCodec, i: int) -> Codec:
    return codec.layer(i) if isinstance(codec, Layers | Recorder) else codec


class _Restored:
    """The values of the forward pass's variables, decoded and computed again on demand, each once."""

    def __init__(self, producer: Any, nonzero: dict[Any, Any], known: dict[Any, Any], stored: dict[Any, Any]):
        self._producer, self._nonzero, self._known, self._stored = producer, nonzero, known, stored
        self._late: set[Any] = set()

    def has(self, var: Any) -> bool:
        return var in self._known

    def is_new(self, var: Any) -> bool:
        """Whether its value is not the one that the forward pass computed."""
        return var in self._late

    def __call__(self, atom: Any, after: Callable[[Any], Any]) -> Any:
        """The value of a variable; `after` makes what it is computed from wait."""
        if is_literal(atom):
            return atom.val
        if atom not in self._known:
            if atom in self._stored:
                codec, code = self._stored[atom]
                self._known[atom] = codec.decode(code if getattr(codec, "elementwise", False) else after(code))
            elif atom in self._nonzero:
                # Of a ReLU's output, which may have been decoded without signs, but not to zero. Of a NaN the mask is false.
                source = self(self._nonzero[atom], after)
                self._known[atom] = jnp.abs(source) > jnp.zeros((), source.dtype)
            else:
                eqn = self._producer[atom]
                values = bind(eqn, [self._operand(operand, after) for operand in eqn.invars])
                self._late.update(eqn.outvars)
                for var, value in zip(eqn.outvars, values, strict=True):
                    self._known.setdefault(var, value)
            self._late.add(atom)
        return self._known[atom]

    def _operand(self, atom: Any, after: Callable[[Any], Any]) -> Any:
        """Of what is computed again: behind a barrier, or the compiler sees that it has been computed before, and keeps it.

        A barrier of its own: one on cotangents besides would keep the compiler from fusing what they are computed by.
        """
        value = self(atom, after)
        if not is_literal(atom) and atom not in self._late:
            value = self._known[atom] = lax.optimization_barrier(value)
            self._late.add(atom)
        return value


def _run_late(
    jaxpr: Any,
    env: dict[Any, Any],
    cotangents: set[Any],
    leaves: dict[Any, Any],
    restored: _Restored,
    see: Callable[[Any, dict[Any, Any]], None] = lambda eqn, env: None,
) -> Arrays:
    """The outputs of a pullback; nothing is computed before an equation that reads a cotangent needs it.

    Args:
      jaxpr: the pullback's.
      env: values by variable: constants and cotangents.
      cotangents: its inputs that are cotangents.
      leaves: by input that is a residual, the variable of the forward pass.
      restored: the value of such a variable.
      see: called with each equation that runs and the values known then, its operands' among them.
    """
    producer = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    late = set(cotangents)

    def get(atom, after):
        if is_literal(atom):
            return atom.val
        if atom not in env:
            if atom in leaves:
                env[atom] = restored(leaves[atom], after)
            else:
                run(producer[atom], after)
        return env[atom]

    def run(eqn, after):
        for atom in eqn.invars:
            get(atom, after)
        if eqn.primitive is lax.optimization_barrier_p and not any(
            atom in late for atom in eqn.invars if not is_literal(atom)
        ):
            # So that something is computed again: what has been already may be fused with what reads it.
            for atom, out in zip(eqn.invars, eqn.outvars, strict=True):
                is_new = not is_literal(atom) and atom in leaves and restored.is_new(leaves[atom])
                env[out] = get(atom, after) if is_new else lax.optimization_barrier(get(atom, after))
            return
        see(eqn, env)
        env.update(zip(eqn.outvars, bind(eqn, read(env, eqn.invars)), strict=True))

    for eqn in jaxpr.eqns:
        waits_for = next((atom for atom in eqn.invars if not is_literal(atom) and atom in late), None)
        if waits_for is None:
            continue

        def after(code, waits_for=waits_for):
            # The cotangent goes on from the barrier too: a barrier with an unused output loses the input.
            code, env[waits_for] = lax.optimization_barrier((code, env[waits_for]))
            return code

        late.update(eqn.outvars)
        run(eqn, after)
    return [get(atom, lambda code: code) for atom in jaxpr.outvars]


def _deviation(square_root: Any, is_deviation: bool) -> Any:
    value = square_root.reshape(-1)
    return value if is_deviation else 1 / value


def _instantiate(ct: Any) -> Any:
    return zeros(ct.aval) if isinstance(ct, jax.custom_derivatives.SymbolicZero) else ct


def _encode(codec: Codec, x: Any) -> Any:
    """`codec.encode(x)`, with an error in place of the wrong zeros that its derivative would be."""
    return codec.encode(
        without_derivative(
            x,
            "memjax.compressed supports first derivatives in reverse mode only: what it saves is rounded. "
            "Differentiate twice without it.",
        )
    )
