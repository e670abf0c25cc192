"""What `memjax.measure` returns, and how it is printed."""

import dataclasses
from typing import Any

from memjax._core.check import readable_bytes


@dataclasses.dataclass(frozen=True, repr=False)
class Measurement:
    """What `memjax.measure` found. Bytes and seconds; None where a figure cannot be had, `notes` saying why.

    Attributes:
      residual_bytes: device memory held between forward and backward: what the forward pass makes and the
        backward pass reads, arguments and constants not included, at the moment when it is largest, on one
        device. What is made under automatic axes of a mesh is taken to be split over as many devices as the
        arguments are, and `notes` says so. None if `fn` cannot be differentiated. This is what JAX saves: the
        compiler may compute cheap values again instead, so `temp_bytes` can be smaller.
      offloaded_bytes: the same, of what is held in host memory.
      temp_bytes: the compiled program's scratch memory, residuals included (per device).
      argument_bytes: the compiled program's arguments; those it does not use are not counted (per device).
      output_bytes: the compiled program's results (per device).
      flops: the compiler's estimate for one execution. Some backends count the body of a loop once.
      compile_seconds: tracing, lowering and compiling. Short if JAX has a trace or a cache entry already.
      peak_bytes: the largest memory of one execution, its arguments included (of the device that needs most).
      notes: what could not be measured, and why.
    """

    residual_bytes: int | None
    offloaded_bytes: int | None
    temp_bytes: int | None
    argument_bytes: int | None
    output_bytes: int | None
    flops: float | None
    compile_seconds: float
    peak_bytes: int | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, ready for `json.dumps`."""
        return dataclasses.asdict(self) | {"notes": list(self.notes)}

    def __repr__(self) -> str:
        return f"Measurement({', '.join(f'{label}: {figure}' for label, figure in self._figures())})"

    def __str__(self) -> str:
        lines = [f"{label:<18} {figure}" for label, figure in self._figures()]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def _figures(self) -> list[tuple[str, str]]:
        return [
            ("residual", _bytes(self.residual_bytes)),
            ("offloaded to host", _bytes(self.offloaded_bytes)),
            ("temp (compiled)", _bytes(self.temp_bytes)),
            ("arguments", _bytes(self.argument_bytes)),
            ("outputs", _bytes(self.output_bytes)),
            ("peak of one run", _bytes(self.peak_bytes)),
            ("compute", "unknown" if self.flops is None else _flops(self.flops)),
            ("compile time", f"{self.compile_seconds:.2f} s"),
        ]


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else readable_bytes(count)


def _flops(count: float) -> str:
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"):
        if abs(count) < 1000 or unit == "PFLOP":
            break
        count /= 1000
    return f"{count:.0f} FLOP" if unit == "FLOP" else f"{count:.2f} {unit}"
