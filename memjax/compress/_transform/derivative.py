"""The derivative of a flat function, its saved arrays passing through a codec.

The forward pass runs what `jax.vjp` does and encodes each saved array (encoder.py), which may give the sums that a batch
norm needs. The backward pass runs the pullback equation by equation (pullback.py) and decodes an array when an equation
first reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from memjax._core.arrays import is_float, strong, zeros
from memjax._core.backward.derivatives import without_derivative
from memjax._core.backward.passes import TracedPasses
from memjax._core.compat import scope
from memjax._core.lists import Arrays, pick
from memjax._core.program.dataflow import variables
from memjax._core.program.jaxpr import Program, bind, read
from memjax._core.program.reasons import Said, asked, with_reason
from memjax.compress._codecs.codec import Mask
from memjax.compress._training.layers import Statistics, Weighed
from memjax.compress._transform.array_codecs import ArrayCodecs, waits
from memjax.compress._transform.encoder import FIRST_ORDER, Encoder
from memjax.compress._transform.keep.choose import MASK, NOTHING, choose, not_kept, why_encoded, why_whole
from memjax.compress._transform.keep.costs import SMALL, Setting
from memjax.compress._transform.keep.needs import Need, needs
from memjax.compress._transform.keep.origins import is_kept_by_loop, kept_by_loop
from memjax.compress._transform.max_pool import evaluate_pools_first, max_pool
from memjax.compress._transform.pullback import NO_WAIT, Restored, Stored, run_late
from memjax.compress._transform.statistics import Reader, only_in_gradients, readers

_REPLACE = {"reduce_window_max": lambda eqn, values: [max_pool(*values, **eqn.params)]}


@jax.tree_util.register_static
class Derivative:
    """The derivative of a program with respect to the inputs in `wanted`.

    Args:
      primal: the program, with calls in place.
      outs: which of its outputs to compute; the others are inputs.
      types: the types of its inputs.
      loops: those of its loops that encode in each iteration, `differentiable.Loops`.
    """

    def __init__(
        self,
        primal: Program,
        outs: Sequence[bool],
        types: Sequence[Any],
        wanted: Sequence[bool],
        setting: Setting,
        loops: Any,
    ):
        self.wanted, given, codecs = wanted, setting.inputs, setting.codecs
        self._names, self._which = pick(setting.names, wanted), setting.which
        self._loops, self._in_loop = loops, setting.in_loop
        out_types = [atom.aval for atom in pick(primal.outvars, outs)]
        self._out_float = [is_float(aval) for aval in out_types]
        # Loops with derivatives of their own read the codecs' settings. So the settings are inputs of the program.
        setting_types = [jax.typeof(one) for one in codecs.settings] if loops else []
        count = len(setting_types)

        def run(inputs):
            def scan(eqn, values):
                return loops.run(eqn, values, inputs[len(types) :]) if eqn in loops else bind(eqn, values)

            replace = {**_REPLACE, "scan": scan}
            return pick(evaluate_pools_first(primal, inputs[: len(types)], replace=replace), outs)

        every, wrt = [*types, *setting_types], [*wanted, *[False] * count]
        self._passes = TracedPasses(run, every, wrt, self._out_float, setting.axes)
        self._program = self._passes.forward
        self._producer = self._program.flow.makers
        self._kept_inputs = pick(self._program.invars, [*given.lasting, *[True] * count])
        parameters = pick(self._program.invars, [*given.parameters, *[False] * count])
        # Now, not when cotangents arrive: a `jax.vmap` around has taken its axis name away by then.
        self._cotangent_types = [strong(aval.to_ct_aval()) for aval in pick(out_types, self._out_float)]
        self._pullback = self._passes.backward(self._cotangent_types)
        residuals, there = variables(self._passes.residuals), set(self._kept_inputs)
        # How exactly the backward pass needs each variable of the forward pass that it wants.
        self._needed = dict.fromkeys(residuals, Need.COARSE)
        wanted_vars = [var for var in self._needed if var not in there]
        self._needed |= needs(self._pullback, wanted_vars, self._pullback.invars)
        self.keep = choose(self._program, self._needed, self._kept_inputs, parameters, self._which, codecs)

    @property
    def scopes(self) -> list[str]:
        """The names of all scopes in the function."""
        inner = (name for body in self._loops.derivatives for name in body.scopes)
        return sorted({*inner, *(self._which.scope(eqn) for eqn in self._program.eqns)} - {""})

    @property
    def matched(self) -> bool:
        """Whether the user's selection matched any residual, small or large, in loops as well."""
        return self.keep.matched or any(body.matched for body in self._loops.derivatives)

    @property
    def encodes(self) -> bool:
        """Whether anything is encoded, in loops as well."""
        return bool(self.keep.encoded or self._loops)

    def forward(self, inputs: Arrays, codecs: ArrayCodecs) -> tuple[Arrays, Any]:
        """The outputs, and what is kept for `backward`."""
        program, keep = self._program, self.keep
        env = program.given([*inputs, *(codecs.settings if self._loops else [])])
        try:
            encoder = Encoder(program, keep, codecs)
        except ValueError:  # settings for other arrays: the gradient that is differentiated again is of other inputs
            for value in inputs:
                without_derivative(value, FIRST_ORDER)
            raise
        encoder.after([*env], env)
        for eqn in program.eqns:
            if not eqn.outvars or not all(var in env for var in eqn.outvars):
                encoder.before(eqn, env)
                env.update(zip(eqn.outvars, bind(eqn, read(env, eqn.invars)), strict=True))
            encoder.after(eqn.outvars, env)
        encoder.finish(self._passes.outputs, env)
        codes = [encoder.codes[var] for var in keep.encoded]
        bits = [encoder.codes[var] for var in keep.masks]
        whole = read(env, keep.whole)
        if self._in_loop:
            codes, whole = kept_by_loop(codes), self._marked(whole)
        if (said := asked()) is not None:
            whole, codes, bits = self._with_reasons(said, whole, codes, bits, codecs)
        codecs.encoded([self._name(var) for var in keep.encoded], keep.roles, codes)
        return read(env, self._passes.outputs), (whole, codes, bits)

    def backward(self, kept: Any, codecs: ArrayCodecs, cotangents: Arrays) -> tuple[Arrays, Statistics | None]:
        """Cotangents of the inputs in `wanted`, and statistics, if the codecs collect them."""
        whole, codes, masks = kept
        is_zero = lambda ct: isinstance(ct, jax.custom_derivatives.SymbolicZero)
        cotangents = [zeros(ct.aval) if is_zero(ct) else ct for ct in pick(cotangents, self._out_float)]
        types = [strong(jax.typeof(ct)) for ct in cotangents]
        pullback = self._pullback if types == self._cotangent_types else self._passes.backward(types)

        encoded, keep = self.keep.encoded, self.keep
        without_signs = only_in_gradients(pullback, keep.origins) - keep.computed
        stored = {var: Stored(Mask().decode, code, waits(Mask())) for var, code in zip(keep.masks, masks, strict=True)}
        for var, code, codec in zip(encoded, codes, codecs.each(keep.roles), strict=True):
            decode = codec.without_signs().decode if var in without_signs else codec.decode
            stored[var] = Stored(decode, code, waits(codec), codec.decoder_to_memory(code))
            if codec.nonzero:
                masks_of_code = [mask for mask, source in keep.nonzero.items() if source is var]
                stored |= {mask: Stored(codec.nonzero, code, waits(codec)) for mask in masks_of_code}
        known = dict(zip(self._program.constvars, self._program.consts, strict=True))
        known |= dict(zip(keep.whole, whole, strict=True))
        restored = Restored(self._producer, keep.nonzero, known, stored, keep.normalised, keep.chained)
        run = functools.partial(run_late, pullback, cotangents, restored)
        if not codecs.reads_gradients:
            return run(), None

        index = {var: i for i, var in enumerate(encoded)}
        reading = readers(pullback, {var: index[origin] for var, origin in keep.origins.items()})
        collector = codecs.collector(self._weighed(reading.values()), [cotangents, codes])
        if collector is None:
            return run(), None
        decoded = lambda var: restored.value(var, NO_WAIT)
        for i, (var, code) in enumerate(zip(encoded, codes, strict=True)):
            collector.code(i, code, var.aval.shape)

        def see(eqn, values):
            if (reader := reading.get(id(eqn))) is not None:
                collector.cotangent(reader, values[reader.cotangent], decoded(encoded[reader.layer]))

        outs = run(see)
        for i, var in enumerate(encoded):
            if var in restored.values:
                collector.decoded(i, decoded(var))
        return outs, collector.statistics()

    def _marked(self, whole: Arrays) -> Arrays:
        """What an iteration keeps as it is, marked where that has been decided: what is small may be large in all iterations."""
        made = lambda var: var in self._producer
        decided = lambda var: made(var) and (var.aval.size >= SMALL or is_kept_by_loop(var, self._producer))
        return [kept_by_loop(one) if decided(var) else one for var, one in zip(self.keep.whole, whole, strict=True)]

    def _with_reasons(
        self, said: Said, whole: Arrays, codes: Arrays, bits: Arrays, codecs: ArrayCodecs
    ) -> tuple[Arrays, Arrays, Arrays]:
        """What is kept, with names that say why; and say what is not kept."""
        keep, needed = self.keep, self._needed
        there = {*self._kept_inputs, *self._program.invars, *self._program.constvars}
        said.dropped += not_kept(self._needed, keep, there, self._program)
        if not self.encodes:
            said.notes.append(NOTHING)
        whole = [
            with_reason(value, why_whole(var, keep, needed, self._which, self._producer))
            for var, value in zip(keep.whole, whole, strict=True)
        ]
        of_codes = [
            why_encoded(codec, is_source=var in keep.computed)
            for var, codec in zip(keep.encoded, codecs.each(keep.roles), strict=True)
        ]
        named = lambda code, reason: jax.tree.map(lambda leaf: with_reason(leaf, reason), code)
        return whole, list(map(named, codes, of_codes)), [named(one, MASK) for one in bits]

    def _name(self, var: Any) -> str:
        """The name of an encoded array in messages: the scope where it is made, and its type."""
        where = scope(self._producer[var]) if var in self._producer else "an input"
        return f"{where or self._producer[var].primitive.name} {var.aval.str_short()}"

    def _weighed(self, reading: Iterable[Reader]) -> list[Weighed]:
        weights: list[tuple[str, ...]] = [()] * len(self.keep.encoded)
        for reader in reading:
            weights[reader.layer] += (self._names[reader.weight],)
        return [(names, var.aval) for names, var in zip(weights, self.keep.encoded, strict=True)]
