"""The parts of an `Explanation`: plain data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A way to keep fewer bytes.

    Attributes:
      kind: "fused loss"; "schedule" (of a long loop); "free" (a cheap function of what is kept anyway: no product is
        recomputed); "recompute"; "tile"; "offload"; "8 bits"; "dtype".
      saves: residual bytes. A module's other rows are included where the remedy is for the module as a whole.
      milliseconds: estimated time that it costs in each step.
      flops: FLOPs that are recomputed.
      is_exact: whether gradients stay as they are.
      how: what to change in the code.
    """

    kind: str
    saves: int
    milliseconds: float
    flops: float
    is_exact: bool
    how: str


@dataclasses.dataclass(frozen=True)
class Row:
    """Alike arrays that are kept between the forward and the backward pass.

    Attributes:
      path: the module that makes them; "layers[0..31]/mlp" stands for 32 modules.
      bytes: of all of them together.
      count: how many there are. Iterations of a loop count.
      share: of all residual bytes.
      shape, dtype: of one of them.
      producer: the operation that makes it.
      readers: the operations of the backward pass that read it, with their modules where those are others.
      source: the line of the user's code that makes it.
      why: for what `memjax.compressed` keeps, why it does so and in how many bits; else "".
      remedies: what would remove it, exact ones first, the cheapest before others; each checkpoint that follows saves more.
    """

    path: str
    bytes: int
    count: int
    share: float
    shape: tuple[int, ...]
    dtype: str
    producer: str
    readers: tuple[str, ...]
    source: str
    remedies: tuple[Remedy, ...] = ()
    why: str = ""


@dataclasses.dataclass(frozen=True)
class PeakRow:
    """What a module has alive at the peak of the compiled program.

    Attributes:
      path: the module.
      kind: "residual", "forward", "backward", "recomputed", "workspace" or "other".
      bytes, count: of how many buffers.
    """

    path: str
    kind: str
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment at which the compiled program has most temporary bytes alive.

    Attributes:
      bytes: those bytes, by a walk over the scheduled program; arguments, outputs and constants not included.
      temp_bytes: the compiler's own figure, how much it reserves.
      rows: who holds them.
      difference: from the residual bytes to `bytes`, step by step: (what, bytes).
      instruction: the one that runs then.
    """

    bytes: int
    temp_bytes: int
    rows: tuple[PeakRow, ...]
    difference: tuple[tuple[str, int], ...]
    instruction: str

    @property
    def ratio(self) -> float:
        """Bytes of the walk over those of the compiler."""
        return self.bytes / self.temp_bytes if self.temp_bytes else 1.0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Bytes alive over the compiled program, by module.

    Attributes:
      modules: their paths, the largest at the peak first.
      instructions: positions in the schedule.
      bytes: for each module, the bytes at these positions.
      backward: the position where the backward pass begins.
    """

    modules: tuple[str, ...]
    instructions: tuple[int, ...]
    bytes: tuple[tuple[int, ...], ...]
    backward: int


@dataclasses.dataclass(frozen=True)
class Alive:
    """An array that is alive at a moment.

    Attributes:
      name: what makes it, and where: "mul model.py:12 (norm)".
      place: where alone; "" if that is not known.
      type: "float32[256,128]"; "" if it is no array.
      bytes: fewer than none where what is alive lies in other memory.
    """

    name: str
    place: str
    type: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class ComparedRow:
    """Alike arrays that are alive at a predicted peak, at the compiled one, or at both.

    Attributes:
      name: what makes them, and where in the user's code.
      type: of one of them; "" if they are no arrays.
      predicted, compiled: bytes of all of them together.
      counts: how many are predicted, and how many compiled.
    """

    name: str
    type: str
    predicted: int
    compiled: int
    counts: tuple[int, int]
