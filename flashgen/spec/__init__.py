"""What to compute (AttentionSpec, masks) and how to lay it out (Schedule)."""

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.mask import Mask, causal, full, window
from flashgen.spec.schedule import BackwardSchedule, Schedule, WarpPartition

__all__ = [
    "AttentionSpec",
    "BackwardSchedule",
    "Mask",
    "Schedule",
    "WarpPartition",
    "causal",
    "full",
    "window",
]
