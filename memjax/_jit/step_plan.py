"""The plan of a whole step as data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

from memjax._core import check
from memjax._jit.summary import summary
from memjax._plan.result import Plan, Tiled

_COUNTS = "budget", "nbytes", "plain_nbytes", "tile_nbytes", "chunks", "predicted_nbytes", "host_nbytes"
_FLAGS = "inner_again", "plain_is_predicted", "updates_in_loops", "two_passes", "ordered_for_memory"


class StepPoint(NamedTuple):
    """What a step is predicted to hold and to take, by one of its plans.

    Attributes:
      nbytes: bytes of a device: arguments, results that are no donated arguments, temporaries.
      seconds: of its derivatives.
      microbatches: as of the plan.
      tiled: whether a loss goes tile by tile, or a loop over time in chunks.
    """

    nbytes: int
    seconds: float
    microbatches: int
    tiled: bool


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a step fits a budget: what each derivative in it keeps between its two passes. Plain data.

    Attributes:
      budget: bytes of a device that the step may hold: arguments, results that are no donated arguments, temporaries, code.
      nbytes: what it holds, compiled.
      plain_nbytes: the same of the step as it is written.
      plain_is_predicted: whether this was predicted, and not compiled.
      passes: by derivative in the step, in the order of their equations, those in loops and branches after the others: the plan
        of its two passes, of which the bytes are temporary ones; None where it runs as it is written. None at all: the whole step
        does.
      tiled: what runs tile by tile, a loss and its gradient at once, or in chunks of time.
      tile_nbytes: what a tile may take, where that is more than usual.
      chunks: in how many chunks of time loops run, with what leads to them and follows: these are what is tiled. 0: in none.
      inner_again: whether derivatives inside of a derivative, such as forces in a loss, compute again what they read.
      microbatches: parts of the batch that the derivative goes through one after the other, adding up gradients.
      updates_in_loops: whether updates of stacked weights run in the loops of backward passes, so that the gradients of one turn
        exist at a time.
      two_passes: whether the derivative is taken twice for that, the first time for numbers that updates need of all gradients.
      ordered_for_memory: whether the compiler orders the step for the least memory. By default it is ordered for speed.
      on_host: numbers of the leaves of the arguments, static ones not counted, that lie in the memory of the host between steps.
      host_nbytes: bytes of a device's parts of these. They are none of `nbytes`.
      notes: what was allowed and cannot be done, why, and what to change.
      predicted_nbytes: what it holds as that was predicted before it was compiled, by the model and by what had been compiled of
        the step until then.
      seconds: predicted seconds of all derivatives by this plan, sums over microbatches included; 0: the step was not planned.
      plain_seconds: the same as the step is written.
    """

    budget: int
    nbytes: int
    plain_nbytes: int
    passes: tuple[Plan | None, ...] = ()
    tiled: tuple[Tiled, ...] = ()
    tile_nbytes: int = 0
    chunks: int = 0
    inner_again: bool = False
    microbatches: int = 1
    updates_in_loops: bool = False
    two_passes: bool = False
    plain_is_predicted: bool = False
    ordered_for_memory: bool = False
    on_host: tuple[int, ...] = ()
    host_nbytes: int = 0
    notes: tuple[str, ...] = ()
    predicted_nbytes: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def as_written(self) -> bool:
        """Whether the step runs as it is written."""
        changed = any(self.passes) or self.tiled or self.microbatches > 1 or self.updates_in_loops or self.on_host
        return not (changed or self.ordered_for_memory)

    def __str__(self) -> str:
        """A summary of at most 15 lines."""
        return summary(self)

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        """The plan that `to_json` wrote; ValueError for any other text."""
        fields = check.json_fields("StepPlan", text, [field.name for field in dataclasses.fields(cls)])
        check.lists("StepPlan", text, fields, ("passes", "tiled", "notes", "on_host"))
        try:
            passes = tuple(None if one is None else Plan.from_json(json.dumps(one)) for one in fields["passes"])
            tiled = tuple(Tiled.of_fields(one) for one in fields["tiled"])
            numbers: dict[str, Any] = {name: check.integer(name, fields[name], least=0) for name in _COUNTS}
            on_host = tuple(check.integer("on_host", one, least=0) for one in fields["on_host"])
            numbers |= {name: check.number(name, fields[name], least=0) for name in ("seconds", "plain_seconds")}
            flags = {name: check.flag(name, fields[name]) for name in _FLAGS}
            numbers["microbatches"] = check.integer("microbatches", fields["microbatches"], least=1)
            if not all(isinstance(note, str) for note in fields["notes"]):
                raise ValueError(f"notes is {check.shown(fields['notes'])}")
        except (TypeError, ValueError) as error:
            raise check.fail(ValueError, "text", "what StepPlan.to_json wrote", text, str(error)) from error
        return cls(passes=passes, tiled=tiled, on_host=on_host, notes=tuple(fields["notes"]), **flags, **numbers)
