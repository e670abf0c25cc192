"""The schedule of a chain that takes the least memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memjax.remat._chain.items import BlockCost, Items, forward_peaks


class LeastMemory:
    """The schedules of the least memory, exact in bytes. Among equal ones it is the fastest.

    For blocks s to t - 1 either block s keeps all, or the first k do not, k being chosen:
    M(s, t) = min(kept_s + M(s + 1, t), max over the split's parts(forward peak, output_{k-1} + M(k, t), M(s, k))).
    """

    def __init__(self, costs: Sequence[BlockCost]):
        n = len(costs)
        self.nbytes = np.zeros((n, n + 1), np.int64)
        self.seconds = np.zeros((n, n + 1))  # recomputed forward passes
        self.split = np.zeros((n, n + 1), np.int64)  # 0: block s keeps all
        output = np.array([cost.output for cost in costs])
        forward = np.concatenate([[0.0], np.cumsum([cost.forward for cost in costs])])
        for s in range(n - 1, -1, -1):
            here, peaks = costs[s], forward_peaks(costs, s)
            for t in range(s + 1, n + 1):
                gradient = costs[t - 1].output
                keep = max(here.kept + gradient + here.forward_work, here.kept + here.backward_work)
                seconds = 0.0
                if t > s + 1:
                    keep = max(keep, here.kept + int(self.nbytes[s + 1, t]))
                    seconds = self.seconds[s + 1, t]
                best, k = (keep, seconds), 0
                if t > s + 1:
                    ks = np.arange(s + 1, t)
                    parts = np.maximum(output[ks - 1] + self.nbytes[ks, t], self.nbytes[s, ks])
                    parts = np.maximum(parts, gradient + peaks[: t - s - 1])
                    again = forward[ks] - forward[s] + self.seconds[ks, t] + self.seconds[s, ks]
                    i = np.lexsort((again, parts))[0]
                    if (parts[i], again[i]) < best:
                        best, k = (parts[i], again[i]), int(ks[i])
                self.nbytes[s, t], self.seconds[s, t] = best
                self.split[s, t] = k

    def items(self, s: int, t: int) -> Items:
        """The schedule for blocks `s` to `t - 1`."""
        items: list[Any] = []
        while s < t:
            k = int(self.split[s, t])
            items.append(self.items(s, k) if k else s)
            s = k or s + 1
        return tuple(items)
