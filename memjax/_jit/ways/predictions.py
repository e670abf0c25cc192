"""What a step is predicted to hold, by the model and by what was compiled of it before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memjax._core.meshes import device_of
from memjax._core.program import costs
from memjax._core.program.breadth_first import breadth_first
from memjax._core.program.dataflow import Dataflow
from memjax._core.program.working import fullest_moment
from memjax._jit.derivatives.body import Acting, Body
from memjax._plan.budget.known import Key
from memjax._plan.derivative import Passes
from memjax._plan.memory.layout import Layout
from memjax._plan.memory.on_device import on_device
from memjax._plan.predicted import as_written
from memjax._plan.solve.order import as_compiled

_IN_PART = 0.5  # of what the model was off by in another program


class Way(NamedTuple):
    """What tells ways to run a step apart of which the model is off by different amounts.

    Attributes:
      body: the step: how many microbatches, what is in tiles, and so on. None: it is compiled by jax.jit, with other options.
      is_planned: whether any of its passes runs by a plan.
      in_steps: whether a backward pass runs in steps.
    """

    body: tuple | None
    is_planned: bool = False
    in_steps: bool = False


def way_of(body: Body, keys: Sequence[Key]) -> Way:
    """How a step runs, the keys being those of the plans of some of its passes."""
    how = body.microbatches, tuple(body.tiled), body.inner_again, body.updates_in_loops, body.two_passes
    in_steps = any(in_steps for in_steps, *_ in keys)
    return Way(how if keys or body.is_changed else None, bool(keys), in_steps)


def plain_bytes(passes: Passes, layout: Layout) -> int:
    """Temporary bytes that the model predicts of passes as they are."""
    if layout.has_parts:
        passes, layout = on_device(passes, layout), layout.of_device
    moment, hoisted = as_written(passes, costs.device(device_of(layout.shardings)).platform)
    return layout.local(moment.nbytes + hoisted + passes.around)


def bytes_in_order(body: Body, acting: Acting) -> int:
    """Temporary bytes that the model predicts of a whole step on one CPU, its passes run so, in the order in which XLA runs it.

    What is made early, such as random bits, is alive besides what each stretch of a plan takes by itself. Results that get no
    donated memory lend theirs until they are computed.
    """
    program = body.program_with(acting)
    flow = breadth_first(Dataflow(as_compiled(program.eqns, "cpu")), program.outvars)
    inputs, outputs = [*program.invars, *program.constvars], program.outvars
    places = [out for i, out in enumerate(outputs) if i not in body.in_use]
    moment = fullest_moment(flow, inputs, [], [], outputs, "cpu", places=places)
    return moment.nbytes


class _Seen(NamedTuple):
    """A step that was compiled: temporary bytes as the model alone has them, and as the compiler took them."""

    way: Way
    model: int
    compiled: int


class Predictions:
    """Predictions of temporary bytes, each corrected by those compiled before that are most alike.

    In plans of one program the model is off by an amount, as by an array that is there a little longer than it has it. Between
    programs of which one runs for fewer examples at a time it is off by a factor, which counts in part. Plans in steps are off by
    other amounts than those that are not: there the compiler has less to choose. On several devices the step as it is written
    tells what XLA gathers, until a plan does.

    Args:
      devices: on which the step runs.
    """

    def __init__(self, devices: int = 1) -> None:
        self._devices = devices
        self._seen: list[_Seen] = []

    def corrected(self, way: Way, model: int) -> int:
        """Bytes that are predicted by now, `model` being what the model alone predicts."""
        comparable = lambda one: one.way._replace(body=way.body) == way and None not in (one.way.body, way.body)
        seen = [one for one in reversed(self._seen) if comparable(one)]
        if not seen and self._devices > 1 and way.body is not None:
            seen = [one for one in self._seen if one.way.body is None]
            return max(model + seen[0].compiled - seen[0].model, 0) if seen else model
        if not seen:
            return model
        # Of those that are equally alike the nearest, and of these the last.
        unlike = lambda one: (one.way.body != way.body, abs(one.model - model))
        one = min(seen, key=unlike)
        if one.way.body != way.body:
            if min(one.model, one.compiled) <= 0:  # it lies in memory of results: that is no factor
                return model
            return round(model * (1 + _IN_PART * (one.compiled / max(one.model, 1) - 1)))
        return max(model + one.compiled - one.model, 0)

    def note(self, way: Way, model: int, compiled: int) -> None:
        """Note what the compiler took where the model had predicted `model` bytes."""
        self._seen.append(_Seen(way, model, compiled))
