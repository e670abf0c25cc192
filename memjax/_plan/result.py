"""A plan as data: what is kept, what is run again, and what that takes."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memjax._core import check
from memjax._core.check import readable_bytes
from memjax._core.program.name_policy import NamePolicy
from memjax._plan.budget.policy import policy_of


class Kept(NamedTuple):
    """One array that is kept for the backward pass.

    Attributes:
      equation: number of the equation of the forward pass that makes it; in a loop that of the body's, and -1 for what the
        loop carries.
      output: which of its outputs it is; for what a loop carries which of the body's inputs.
      nbytes: of the array, or of its code; in a loop of one turn's.
      what: its type, what makes it, and where in the code.
      bits: of each value in its code, 1 of booleans; None: it is kept as it is.
      on_host: whether it is moved to the memory of the host and back.
      name: that the program gives it by `jax.ad_checkpoint.checkpoint_name`; None: none.
    """

    equation: int
    output: int
    nbytes: int
    what: str
    bits: int | None = None
    on_host: bool = False
    name: str | None = None

    @property
    def how(self) -> str:
        """What is said of it behind `what`: nothing where it is kept as it is."""
        if self.on_host:
            return ", on the host"
        return "" if self.bits is None else ", as bits" if self.bits == 1 else f", in {self.bits} bits"


class InBlocks(NamedTuple):
    """How the turns of a loop run again in the backward pass: in blocks, from states that are kept.

    Attributes:
      block: turns of a block. What is kept of each of them is there while the block is backpropagated.
      tail: turns at the end, of which it is kept from the forward pass on.
      levels: of nested loops, the number of parts on each level, the outermost first; none where there is a schedule. Of a loop
        that ends early, how many states are kept, and how many more there are while turns run again.
      slots: of an optimal schedule over the blocks, the number of states; 0: there is none.
      state_nbytes: of a state.
    """

    block: int
    tail: int
    levels: tuple[int, ...]
    slots: int
    state_nbytes: int

    @property
    def states(self) -> int:
        """How many states are kept between the two passes."""
        return self.slots or (self.levels[0] if self.levels else 0)


class Stretch(NamedTuple):
    """A stretch of the forward pass whose residuals are kept, or computed again at its turn in the backward pass.

    Attributes:
      start, stop: numbers of equations of the forward pass.
      kept: what is kept of it, besides what later stretches start from.
      handed_on: bytes of that.
      turns: of a loop how many of its turns are meant; those that keep something else are another stretch with the same
        equations. None: no loop.
      seconds: predicted time spent on running again and on keeping.
      working_nbytes: predicted bytes alive while it has its turn in the backward pass, what is kept of it included.
      in_blocks: of a loop whose turns run again in blocks: how; else None.
      crossing: what later stretches start from.
      not_kept: names that the program gives to what is not kept of it.
    """

    start: int
    stop: int
    kept: tuple[Kept, ...]
    handed_on: int
    turns: int | None
    seconds: float
    working_nbytes: int
    in_blocks: InBlocks | None = None
    crossing: tuple[Kept, ...] = ()
    not_kept: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes kept on the device, what is handed on included."""
        of_turn = sum(kept.nbytes for kept in self.kept if not kept.on_host)
        if self.in_blocks is not None:
            states = self.in_blocks.states * self.in_blocks.state_nbytes
            return self.handed_on + states + self.in_blocks.tail * of_turn
        return self.handed_on + (self.turns or 1) * of_turn

    @property
    def host_nbytes(self) -> int:
        """Bytes kept in the memory of the host."""
        return (self.turns or 1) * sum(kept.nbytes for kept in self.kept if kept.on_host)


class Tiled(NamedTuple):
    """A part of the program that runs tile by tile, in both passes.

    Attributes:
      equation: number of the equation whose result never exists as a whole, in the program with its calls in place.
      dim: of that result, along which tiles are taken.
      tile: positions per tile.
      length: positions.
      nbytes: of the whole result.
      what: its type, and where in the code.
      loop: number of the equation in whose body it is, a scan: then `equation` counts there.
    """

    equation: int
    dim: int
    tile: int
    length: int
    nbytes: int
    what: str
    loop: int | None = None

    @classmethod
    def of_fields(cls, fields: Sequence[Any]) -> Tiled:
        """What data say; ValueError if they say something else."""
        return _typed(cls, fields)

    def __str__(self) -> str:
        where = "" if self.loop is None else ", in each turn of a loop"
        return f"in tiles of {self.tile} of {self.length} positions: {readable_bytes(self.nbytes)}  {self.what}{where}"


class Point(NamedTuple):
    """A point of a frontier: predicted temporary bytes and seconds of one step."""

    nbytes: int
    seconds: float


class Try(NamedTuple):
    """A plan that was compiled, in the course of finding one.

    The step that keeps everything is compiled without a prediction: its number is that after the last plan of the frontier, and
    its predicted bytes are the compiled ones.

    Attributes:
      number: of the plan in its frontier; one after these for a plan that keeps a little less than one of them.
      predicted: temporary bytes as the model alone has them.
      expected: the same, corrected by the plans that had been compiled before.
      compiled: what the compiler took.
    """

    number: int
    predicted: int
    expected: int
    compiled: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a function keeps between its forward and its backward pass, and what it computes again. Plain data.

    Attributes:
      budget: bytes that the plan was made for.
      nbytes: predicted temporary bytes of value and gradient, corrected by what compiling gave.
      first_nbytes: the same as the model alone had predicted it for this plan.
      compiled_nbytes: what the compiler takes for this plan; None if it was not compiled.
      seconds: predicted time of one step.
      plain_seconds: the same with nothing run again that is worth keeping.
      stretches: the forward pass in order; none if all that the backward pass reads is kept, as without a plan.
      points: the frontier of all plans.
      tries: the plans that were compiled to find this one, in order.
      program: digest of the program that the plan is of.
      platform: that it was compiled for; it is acted on in the same way wherever it is traced.
      tiled: the parts that run tile by tile.
      notes: what was allowed and is not done, and why.
      in_steps: whether the backward pass makes its large arrays one after another, where the compiler would make several at a
        time. That takes less memory and a little more time.
      assumes: under which assumption the bytes are those of a device, where arguments lie on a mesh; "" if under none. They are
        those of value and gradients: a step that updates parameters takes as much, and what the update itself needs.
      gathers_again: whether sharded inputs are gathered again for what is computed again, as where arguments lie on a mesh.
    """

    budget: int
    nbytes: int
    first_nbytes: int
    compiled_nbytes: int | None
    seconds: float
    plain_seconds: float
    stretches: tuple[Stretch, ...]
    points: tuple[Point, ...]
    tries: tuple[Try, ...]
    program: str
    platform: str
    tiled: tuple[Tiled, ...] = ()
    in_steps: bool = False
    notes: tuple[str, ...] = ()
    assumes: str = ""
    gathers_again: bool = False

    @property
    def host_nbytes(self) -> int:
        """Bytes kept in the memory of the host."""
        return sum(stretch.host_nbytes for stretch in self.stretches)

    def frontier(self) -> list[Point]:
        """The curve of time against memory of all plans, from the least memory to the least time, from one solution."""
        return list(self.points)

    def plot(self, path: Any = None, *, ax: Any = None) -> Any:
        """Draw the frontier, and this plan on it; returns the axes. Needs matplotlib.

        Args:
          path: file to save the picture to; None: none.
          ax: axes of matplotlib to draw on; None: new ones.
        """
        from matplotlib import pyplot as plt

        check.axes(ax)
        if path is not None:
            check.path("path", path)
        if ax is None:
            _, ax = plt.subplots(figsize=(6, 4), layout="constrained")
        ax.step(
            [point.nbytes / 2**20 for point in self.points],
            [point.seconds * 1e3 for point in self.points],
            where="post",
            label="fastest plan within a budget",
        )
        ax.plot(self.nbytes / 2**20, self.seconds * 1e3, "o", color="black", label="this plan")
        ax.set_xlabel("temporary memory, MiB")
        ax.set_ylabel("predicted time of a step, ms")
        ax.legend()
        if path is not None:
            ax.figure.savefig(path, dpi=150)
        return ax

    def as_policy(self) -> NamePolicy:
        """The plan as a policy of `jax.checkpoint` by names, for trainers that have such policies and programs without memjax.

            policy = memjax.plan(loss, params, batch, budget="20GiB").as_policy()
            jax.checkpoint(layer, policy=policy)  # policy.saved are its names, for a configuration

        Put it round the body of each loop over layers, and round what runs before and after the loops; where there are no loops,
        round the function. Then the same arrays are kept. What is computed again may take longer: a plan keeps `tanh(x)` for both
        its derivative and what reads it, and JAX computes a value again whose name is given to a copy of it. So name what
        products give. XLA schedules what is computed again, so bytes may differ: `memjax.measure` tells.

        Returns:
          A policy of `memjax.remat.policies`, which `jax.checkpoint` and `memjax.remat.checkpoint` take.

        Raises:
          ValueError: there is no such policy. It says why: the plan computes nothing again, keeps arrays that have no name, keeps
            some arrays of a name and not others, or has schedules, tiles or codes.
        """
        return policy_of(self)

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; ValueError for any other text."""
        fields = check.json_fields("Plan", text, [field.name for field in dataclasses.fields(cls)])
        check.lists("Plan", text, fields, ("stretches", "points", "tries", "tiled", "notes"))
        try:
            return cls._of_fields(fields)
        except (TypeError, ValueError) as error:
            raise check.fail(ValueError, "text", "what Plan.to_json wrote", text, str(error)) from error

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Plan:
        stretches = []
        for start, stop, kept, *rest in fields["stretches"]:
            arrays = lambda some: tuple(_typed(Kept, one, least={"equation": -1}) for one in some)
            one = Stretch(start, stop, arrays(kept), *rest)
            if not all(isinstance(name, str) for name in one.not_kept):
                raise ValueError(f"not_kept is {check.shown(one.not_kept)}")
            one = one._replace(crossing=arrays(one.crossing), not_kept=tuple(one.not_kept))
            if one.in_blocks is not None:
                block, tail, levels, *others = one.in_blocks
                one = one._replace(in_blocks=_typed(InBlocks, (block, tail, tuple(levels), *others)))
            stretches.append(_typed(Stretch, one))
        points = tuple(_typed(Point, point, least={"nbytes": -math.inf}) for point in fields["points"])
        tries = tuple(_typed(Try, one) for one in fields["tries"])
        tiled = tuple(map(Tiled.of_fields, fields["tiled"]))
        lists = {"stretches": tuple(stretches), "points": points, "tries": tries, "tiled": tiled}
        if not all(isinstance(note, str) for note in fields["notes"]):
            raise ValueError(f"notes is {check.shown(fields['notes'])}")
        plan = cls(**fields | lists | {"notes": tuple(fields["notes"])})
        _check_types(plan, dict(vars(plan)))
        return plan

    def __str__(self) -> str:
        compiled = "" if self.compiled_nbytes is None else f", compiled {readable_bytes(self.compiled_nbytes)}"
        lines = [
            f"plan for {readable_bytes(self.budget)}: predicted {readable_bytes(self.nbytes)}{compiled}; "
            f"{self.seconds / self.plain_seconds:.3f} of the time without running again"
            + (f"; {readable_bytes(self.host_nbytes)} on the host" if self.host_nbytes else "")
            + ("; large arrays of the backward pass one after another" if self.in_steps else "")
            + ("" if self.stretches else "; nothing runs again, as without a plan"),
        ]
        lines += map(str, self.tiled)
        lines += self.notes
        lines += [f"bytes of a device, if {self.assumes}"] if self.assumes else []
        for times, stretch in _alike(self.stretches):
            many = f"{times} x " if times > 1 else ""
            lines.append(
                f"{many}{stretch.stop - stretch.start} equations from {stretch.start}"
                + (f", {stretch.turns} turns of a loop" if stretch.turns else "")
                + _in_blocks(stretch.in_blocks, stretch.turns)
                + f": hands on {readable_bytes(stretch.handed_on)}, runs {stretch.seconds * 1e3:.2f} ms again, keeps"
                + ("" if stretch.kept else " nothing else")
            )
            lines += [f"    {readable_bytes(kept.nbytes):>10}  {kept.what}{kept.how}" for kept in stretch.kept]
        return "\n".join(lines)


def _typed(kind: Any, values: Sequence[Any], least: Mapping[str, float] = types.MappingProxyType({})) -> Any:
    """A named tuple of these values, if they are of its types, and no number is negative."""
    found = kind(*values)
    _check_types(found, found._asdict(), least)
    return found


def _check_types(
    found: Any, values: Mapping[str, Any], least: Mapping[str, float] = types.MappingProxyType({})
) -> None:
    hints = typing.get_type_hints(type(found))
    for name, value in values.items():
        wanted = typing.get_args(hints[name]) if isinstance(hints[name], types.UnionType) else (hints[name],)
        right = type(value) in (*wanted, int if float in wanted else None) or any(
            typing.get_origin(one) is tuple for one in wanted
        )
        number = type(value) in (int, float)
        if not right or (number and not least.get(name, 0) <= value < math.inf):
            raise ValueError(f"{name} is {check.shown(value)}")


def _in_blocks(how: InBlocks | None, turns: int | None) -> str:
    if how is None or not how.states:
        return ""
    over = f"of {how.slots} states by a schedule" if how.slots else f"of {' x '.join(map(str, how.levels))} blocks"
    if not how.slots and how.block * math.prod(how.levels) + how.tail != turns:  # it ends early
        over = f"from {' + '.join(map(str, how.levels))} states"
    return (
        f" that run again in blocks of {how.block}, the last {how.tail} not, {over}, "
        f"each state {readable_bytes(how.state_nbytes)}"
    )


def _alike(stretches: Sequence[Stretch]) -> list[tuple[int, Stretch]]:
    """Runs of stretches that keep the same, with how many they are; two kinds that alternate are counted as well."""
    found: list[tuple[int, Stretch]] = []
    kinds: dict[Any, int] = {}
    for stretch in stretches:
        kept, crossing = (
            tuple((kept.equation - stretch.start, *kept[1:]) for kept in some)
            for some in (stretch.kept, stretch.crossing)
        )
        key = (stretch.stop - stretch.start, kept, *stretch[3:8], crossing, stretch.not_kept)
        if key in kinds:
            times, first = found[kinds[key]]
            found[kinds[key]] = (times + 1, first)
        else:
            kinds[key] = len(found)
            found.append((1, stretch))
    return found
