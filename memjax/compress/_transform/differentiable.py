"""Differentiates a program through codecs, and its loops iteration by iteration."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax._core import check
from memjax._core.arguments import is_array
from memjax._core.arrays import is_float
from memjax._core.backward.derivatives import forward_mode_message, perturbed, refusing_forward_mode
from memjax._core.clear_errors import call_errors
from memjax._core.compat import eval_jaxpr, scan_counts, scope
from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.program.dataflow import is_literal, variables
from memjax._core.program.jaxpr import Program, as_closed, axis_sizes, calls_in_place, nbytes
from memjax.compress._transform.array_codecs import ArrayCodecs
from memjax.compress._transform.derivative import Derivative
from memjax.compress._transform.keep.costs import Setting, Which
from memjax.compress._transform.keep.origins import Inputs, Origins, Parameters, inputs_of


class Differentiable:
    """Evaluates a closed jaxpr as a function of its constants and inputs, differentiated by `Derivative`."""

    def __init__(self, closed: Any, setting: Setting):
        self._closed, self._setting, self._codecs = closed, setting, setting.codecs
        self._position = {var: i for i, var in enumerate([*closed.jaxpr.constvars, *closed.jaxpr.invars])}
        # An output that is an input is not passed through the derivative: it has nothing to do with what is saved.
        self._made = [is_literal(var) or var not in self._position for var in closed.jaxpr.outvars]
        self._derivatives: dict[Any, Derivative] = {}

    def __call__(self, inputs: Arrays) -> Arrays:
        outs = iter(self._run()(self._codecs.settings, inputs))
        outvars = self._closed.jaxpr.outvars
        return [
            next(outs) if made else inputs[self._position[var]] for var, made in zip(outvars, self._made, strict=True)
        ]

    def with_settings(self, settings: Arrays) -> Differentiable:
        """A copy with other settings of the codecs. It shares the derivatives, which do not depend on settings."""
        changed = copy.copy(self)
        changed._codecs = self._codecs.with_settings(settings)
        return changed

    def derivative(self, types: Sequence[Any], wanted: Sequence[bool]) -> Derivative:
        """The derivative for inputs of these types, with respect to those in `wanted`."""
        key = tuple(types), tuple(wanted)
        if key not in self._derivatives:  # JAX may trace the body of a loop several times
            program = calls_in_place(self._closed, differentiable=True).with_inputs(len(self._closed.consts))
            loops = Loops(program, wanted, self._setting)
            self._derivatives[key] = Derivative(program, self._made, types, wanted, self._setting, loops)
        return self._derivatives[key]

    def _run(self) -> Callable[[Arrays, Arrays], Arrays]:
        """A function from (the codecs' settings, inputs) to the outputs that are no inputs."""
        closed, codecs, n_consts = self._closed, self._codecs, len(self._closed.consts)

        @jax.custom_vjp
        def run(settings, inputs):
            return pick(eval_jaxpr(closed.jaxpr, inputs[:n_consts], inputs[n_consts:]), self._made)

        def forward(settings, inputs):
            wanted = perturbed(inputs)
            settings, inputs = ([primal.value for primal in group] for group in (settings, inputs))
            check.known_sizes("compressed", inputs)
            derivative = self.derivative([jax.typeof(value) for value in inputs], wanted)
            if not self._setting.in_loop:
                self._check(derivative)
            outs, kept = derivative.forward(inputs, codecs.with_settings(settings))
            return outs, (derivative, settings, kept)

        def backward(residuals, cotangents):
            derivative, settings, kept = residuals
            set_codecs = codecs.with_settings(settings)
            input_cotangents, statistics = derivative.backward(kept, set_codecs, cotangents)
            nones = [None] * (len(derivative.wanted) - len(input_cotangents))
            return set_codecs.settings_cotangents(statistics), merge(input_cotangents, nones, derivative.wanted)

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run

    def _check(self, derivative: Derivative) -> None:
        """Raises ValueError if `where` matches nothing; warns if nothing is encoded."""
        which = self._setting.which
        if which.where is not None and which.needed and not derivative.matched:
            wanted = "a match for something that the backward pass reads"
            fix = f"the named scopes of the function are {derivative.scopes}"
            raise check.fail(ValueError, "where", wanted, which.where, fix)
        if derivative.keep.refused and not derivative.encodes:
            largest = max((var.aval for var in derivative.keep.refused), key=nbytes)
            warnings.warn(
                f"memjax.compressed leaves everything as it is: the code of {largest.str_short()} would take "
                f"{self._codecs.nbytes(largest):,} bytes and the array takes {nbytes(largest):,}. Give "
                f"{self._codecs.name} fewer bits per value, or leave the codec out for the default.",
                stacklevel=4,
            )


# Loops: what an iteration keeps is encoded in it.
#
# Encoded after the loop, the arrays of all iterations would be there at once, stacked, and be decoded at once before the backward
# loop. So the body of a scan is compressed by itself, as if the user had done so, and what it keeps is stacked. Of what it reads,
#
#     slices of what lasts until the backward pass, as the layers' weights    are kept anyway, and never encoded
#     other slices, and what is carried                                      may be encoded in each iteration
#     what is the same in all iterations                                     is left to the program around: one code is enough
#
# A loop in whose iterations nothing is encoded, because arrays are small, is left as it is: its stacks may be large.


class Loops:
    """The loops of a program that encode in each iteration.

    Args:
      wanted: inputs of the program that are differentiated.
    """

    def __init__(self, program: Program, wanted: Sequence[bool], setting: Setting):
        self._bodies: dict[int, Any] = {}  # by id(eqn)
        self.derivatives: list[Any] = []
        scans = [eqn for eqn in program.eqns if eqn.primitive.name == "scan"]
        if not scans or not setting.codecs.in_iterations:
            return
        origins, inputs = Origins(program), setting.inputs
        kept, known = pick(program.invars, inputs.lasting), pick(program.invars, inputs.parameters)
        self._parameters = Parameters(program, origins, {*kept, *program.constvars}, set(known))
        self._constants = origins.constants
        self._of_derivative = program.flow.depending(pick(program.invars, wanted))
        for eqn in scans:
            of_body, of_derivative = self._operands(eqn)
            if any(of_derivative):
                closed, which = as_closed(eqn.params["jaxpr"]), setting.which.within(scope(eqn))
                names = [""] * len(of_derivative)
                body = Differentiable(closed, Setting(of_body, setting.codecs, which, names, axis_sizes(closed), True))
                derivative = body.derivative([var.aval for var in closed.jaxpr.invars], of_derivative)
                if derivative.encodes:
                    self._bodies[id(eqn)] = body
                    self.derivatives.append(derivative)

    def _operands(self, eqn: Any) -> tuple[Inputs, list[bool]]:
        """The inputs of a loop's body, and those of them that are differentiated."""
        consts, carried = scan_counts(eqn)
        of_derivative = not self._of_derivative.isdisjoint(variables(eqn.invars))
        lasting, parameters, wanted = [], [], []
        for i, atom in enumerate(eqn.invars):
            is_carried, is_constant = consts <= i < consts + carried, is_literal(atom) or atom in self._constants
            lasts = is_constant or self._parameters.sources(atom) is not None
            lasting.append(i < consts or (not is_carried and lasts))
            parameters.append(not is_carried and not is_literal(atom) and self._parameters.is_parameter(atom))
            is_wanted = is_carried or (not is_literal(atom) and atom in self._of_derivative)
            wanted.append(of_derivative and is_float(atom.aval) and is_wanted)
        return Inputs(lasting, parameters), wanted

    def __bool__(self) -> bool:
        return bool(self._bodies)

    def __contains__(self, eqn: Any) -> bool:
        return id(eqn) in self._bodies

    def run(self, eqn: Any, values: Arrays, settings: Arrays) -> Arrays:
        """Runs `eqn`, a scan for which `eqn in self`, with `settings` for the codecs; returns its outputs."""
        body = self._bodies[id(eqn)].with_settings(settings)
        consts, carried = scan_counts(eqn)

        def iteration(carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
            outs = body([*values[:consts], *carry, *xs])
            return outs[:carried], outs[carried:]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(iteration, values[consts : consts + carried], values[consts + carried :], **options)
        return [*carry, *ys]


_FORWARD_MODE = forward_mode_message("memjax.compressed", "the function itself, of which forward mode saves nothing")


def call_compressed(
    f: Callable[..., Any], lasting: Any, passing: Any, *, user: Any, codecs: ArrayCodecs, which: Which
) -> Any:
    """Calls `f(lasting, passing)`, differentiated through codecs.

    Args:
      f: a function of two pytrees. Their leaves, and those of its result, that are no arrays are left as they are.
      lasting: arrays that live until the backward pass anyway, and are never encoded, like the arrays that `f` closes over.
      passing: arrays that may be encoded.
      user: the user's function or module, for errors.
    """
    leaves, tree = jax.tree.flatten((lasting, passing))
    dynamic = [_is_dynamic(leaf) for leaf in leaves]
    arrays = [jnp.asarray(leaf) for leaf in pick(leaves, dynamic)]
    static_result = []

    def flat(*arrays):
        out = f(*jax.tree.unflatten(tree, merge(arrays, drop(leaves, dynamic), dynamic)))
        out_leaves, out_tree = jax.tree.flatten(out)
        out_dynamic = [_is_dynamic(leaf) for leaf in out_leaves]
        static_result.append((out_tree, out_dynamic, drop(out_leaves, out_dynamic)))
        return pick(out_leaves, out_dynamic)

    # A module's variables are not what a caller gives.
    given = passing if isinstance(user, type) else (lasting, passing)
    with call_errors("f_or_module", user, {"arguments": given}):
        closed = jax.make_jaxpr(flat)(*arrays)
    [(out_tree, out_dynamic, out_static)] = static_result
    inputs = [*closed.consts, *arrays]
    lasts = [True] * (len(closed.consts) + sum(dynamic[: len(jax.tree.leaves(lasting))]))
    lasts += [False] * (len(inputs) - len(lasts))
    paths = [path[1:] for path, _ in jax.tree_util.tree_leaves_with_path((lasting, passing))]  # of what they are in
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in pick(paths, dynamic)]

    given_inputs = inputs_of(lasts, [jax.typeof(value) for value in inputs])
    run = Differentiable(
        closed, Setting(given_inputs, codecs, which, [""] * len(closed.consts) + names, axis_sizes(closed))
    )
    every = refusing_forward_mode(run, _FORWARD_MODE)(inputs)
    return jax.tree.unflatten(out_tree, merge(every, out_static, out_dynamic))


def _is_dynamic(leaf: Any) -> bool:
    """Whether a leaf is traced; numbers are not."""
    return isinstance(leaf, jax.Array | np.ndarray) and is_array(leaf)
