"""The derivative of a flat function in two passes, with the fewest bytes kept between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import jax

from memjax._core.arrays import strong
from memjax._core.backward.minimum_cut import cheapest
from memjax._core.backward.passes import TracedPasses
from memjax._core.compat import varying
from memjax._core.lists import Arrays, drop, pick
from memjax._core.program.dataflow import Dataflow, is_literal, made_by, read_by, variables
from memjax._core.program.jaxpr import Program, evaluate_in, nbytes, read
from memjax._core.program.primitives import expensive


class Backward:
    """The derivative of `f`, from a list of arrays to a list of arrays, with respect to some of its inputs.

    What is kept is the smallest set of values from which the residuals follow without repeating matrix products and the
    like. Inputs that are there again in the backward pass are never kept.

    Args:
      f: the function, traced once more.
      inputs: types of its inputs.
      wrt: which inputs to differentiate with respect to.
      out_float: which outputs carry a gradient.
      invariant: which inputs are the same at every call; what depends on them alone is never kept. None: no input.
      lost: which inputs are not there in the backward pass. None: no input.

    Attributes:
      program: the forward pass, from the inputs to the outputs, then the residuals.
      available: inputs of `program` that are there in the backward pass.
      kept: types of what `keep` returns for `back`.
      kept_outputs: for each output its place in `kept`, None where it is not kept.
      kept_nbytes: their bytes.
    """

    def __init__(
        self,
        f: Callable[[Arrays], Arrays],
        inputs: Sequence[Any],
        wrt: Sequence[bool],
        out_float: Sequence[bool],
        *,
        invariant: Sequence[bool] | None = None,
        lost: Sequence[bool] | None = None,
    ):
        self.wrt, self.out_float = list(wrt), list(out_float)
        invariant = [False] * len(inputs) if invariant is None else invariant
        lost = [False] * len(inputs) if lost is None else lost
        self._varying = [varying(aval) for aval in inputs]
        self._passes = TracedPasses(f, inputs, self.wrt, self.out_float, {})
        program = self._passes.forward
        self._consts, self.program = list(program.consts), program
        self.available, n_out = drop(program.invars, lost), len(self.out_float)
        self._outs, self._residuals = program.outvars[:n_out], program.outvars[n_out:]
        constant = [*program.constvars, *pick(program.invars, invariant)]
        self._keeps(_smallest_kept(program.flow, constant, self.available, self._residuals))

    def _keeps(self, kept: Sequence[Any]) -> None:
        program, flow = self.program, self.program.flow
        self._kept = list(kept)
        self._keep = Part(flow, [*program.constvars, *program.invars], [*self._outs, *self._kept], effects=True)
        known = [*program.constvars, *self.available, *self._kept]
        self._rebuild = Part(flow, known, self._residuals, effects=False)
        self.kept = [var.aval for var in self._kept]
        places = {var: i for i, var in enumerate(self._kept)}
        self.kept_outputs = [None if is_literal(var) else places.get(var) for var in self._outs]
        self.kept_nbytes = sum(map(nbytes, self.kept))

    def keeping(self, kept: Sequence[Any]) -> Self:
        """The same derivative that keeps these variables of `program`, from which its residuals have to follow."""
        found = copy.copy(self)
        found._keeps(kept)
        return found

    @property
    def kept_places(self) -> tuple[int, ...]:
        """Which of the variables of `program` are kept, by number."""
        numbers = {var: i for i, var in enumerate([*self.program.invars, *made_by(self.program.eqns)])}
        return tuple(numbers[var] for var in self._kept)

    def pull(self) -> Program:
        """The backward pass, from cotangents of the outputs with a gradient. It reads variables of `program`."""
        outs = pick(self._outs, self.out_float)
        return self._passes.backward([strong(out.aval.to_ct_aval()) for out in outs])

    def keep(self, inputs: Arrays) -> tuple[Arrays, Arrays]:
        """Runs the forward pass. Returns (outputs, the values that `back` needs)."""
        # Sums over devices are part of the program, so it is wrong by a factor for values that vary over other axes.
        assert [varying(jax.typeof(value)) for value in inputs] == self._varying, "inputs vary over other mesh axes"
        out = self._keep([*self._consts, *inputs])
        return out[: len(self._outs)], out[len(self._outs) :]

    def back(self, available: Arrays, kept: Arrays, cts: Arrays) -> Arrays:
        """Cotangents of the chosen inputs, from the inputs that are not lost and those of the outputs with a gradient."""
        residuals = self._rebuild([*self._consts, *available, *kept])
        return self._passes.pull(residuals, cts)

    def nbytes_with(self, outputs: int) -> int:
        """Bytes of the kept values and the first `outputs` outputs together, without those that are inputs."""
        held = {var for var in (*self._kept, *self._outs[:outputs]) if not is_literal(var)}
        return sum(nbytes(var.aval) for var in held.difference(self._keep.known))


class Part:
    """The equations that lead from `known` variables to `wanted` ones, in order.

    With `effects`, equations with effects (callbacks) run even if nothing wanted depends on them.
    """

    def __init__(self, flow: Dataflow, known: Iterable[Any], wanted: Sequence[Any], *, effects: bool):
        self.known, self.wanted = list(known), list(wanted)
        have = set(self.known)
        self.eqns = flow.needed(self.wanted, have, flow.acting if effects else ())
        if missing := {*variables(self.wanted), *read_by(self.eqns)} - have - flow.makers.keys():
            raise AssertionError(f"not computable from what is known: {missing}")

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        env = dict(zip(self.known, values, strict=True))
        evaluate_in(self.eqns, env)
        return read(env, self.wanted)


def _smallest_kept(flow: Dataflow, invariant: Iterable[Any], again: Iterable[Any], wanted: Iterable[Any]) -> list[Any]:
    """Variables, fewest bytes in all, from which every `wanted` one follows cheaply.

    The residuals of reverse-mode differentiation are redundant. An LSTM keeps gates, their derivatives and tanh of the state,
    where the sum that goes into the gates gives them all.

    Args:
      flow: of straight-line equations. Inputs that are not named below (the carry) are lost unless they are kept.
      invariant: inputs that are the same for every step; what depends on them alone is never kept.
      again: inputs that are there again in the backward pass; what follows from them cheaply is never kept.
      wanted: what has to be recomputable.
    """
    alike = flow.following(invariant, lambda eqn: not eqn.effects)
    available = flow.following({*alike, *again}, lambda eqn: not expensive(eqn))
    to_keep = lambda var: max(nbytes(var.aval), 1)
    to_recompute = lambda eqn: None if expensive(eqn) else 0
    return cheapest(wanted, flow.makers, available, to_keep, to_recompute, late=False)
