"""An explanation for other tools: a trace for Perfetto and Chrome, and figures for loggers."""

from __future__ import annotations

import json
from typing import Any

_PASSES = "forward pass", "backward pass"


def trace_of(timeline: Any) -> str:
    """The timeline as a trace in the JSON of Chrome: a counter for each module, and the two passes.

    A position in the schedule is a microsecond: a compiled program does not say how long its instructions take.
    """
    last = timeline.instructions[-1] + 1
    borders = 0, min(timeline.backward, last), last
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "memory of the compiled program"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "instructions of the schedule"}},
    ]
    for name, start, stop in zip(_PASSES, borders, borders[1:], strict=False):
        events.append({"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": stop - start})
    for at, alive in zip(timeline.instructions, zip(*timeline.bytes, strict=True), strict=True):
        count = lambda name, nbytes, at=at: {"ph": "C", "name": name, "pid": 1, "ts": at, "args": {"bytes": nbytes}}
        events.append(count("temporary memory", sum(alive)))
        events += [count(f"of {name}", nbytes) for name, nbytes in zip(timeline.modules, alive, strict=True)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def figures_of(explanation: Any) -> dict[str, int]:
    """Bytes by name: of all that is kept, of each module, and of the peak by kind."""
    found = {"residual_bytes": explanation.residual_bytes, "offloaded_bytes": explanation.offloaded_bytes}
    for row in explanation.rows:
        name = f"kept/{row.path}"
        found[name] = found.get(name, 0) + row.bytes
    if (peak := explanation.peak) is not None:
        found |= {"peak_bytes": peak.bytes, "temp_bytes": peak.temp_bytes}
        for row in peak.rows:
            name = f"peak/{row.kind}"
            found[name] = found.get(name, 0) + row.bytes
    return found
