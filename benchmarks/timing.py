"""How the benchmarks take the time of a call on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def milliseconds(run: Callable[[], object], times: int) -> float:
    """Mean time of one call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times
