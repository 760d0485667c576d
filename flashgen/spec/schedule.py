"""``Schedule``: how a kernel is laid out on the machine. Anything left None is chosen by the plan's table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flashgen.errors import SpecError
from flashgen.spec.show import show

PartitionKind = Literal["split_q", "split_k"]
WARP_COUNTS = (1, 2, 4, 8, 16)


def _tile_violations(schedule: Schedule | BackwardSchedule, prefix: str) -> Iterator[str]:
    for name in ("tile_q", "tile_kv"):
        value = getattr(schedule, name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 16 <= value <= 256 or value % 16
        ):
            yield f"{prefix}{name}={show(value)} is not supported; use a multiple of 16 from 16 to 256"
    stages = schedule.stages
    if stages is not None and (type(stages) is not int or not 1 <= stages <= 4):
        yield f"{prefix}stages={show(stages)} is not supported; use a whole number from 1 to 4"


@dataclass(frozen=True, slots=True)
class BackwardSchedule:
    """Tile sizes, stages and warps of the backward kernels."""

    tile_q: int | None = None
    tile_kv: int | None = None
    stages: int | None = None
    warps: int | None = None

    def __post_init__(self) -> None:
        problems = list(_tile_violations(self, "backward "))
        if self.warps is not None and (type(self.warps) is not int or self.warps not in WARP_COUNTS):
            problems.append(f"backward warps={show(self.warps)} is not supported; use 1, 2, 4, 8 or 16")
        if problems:
            raise SpecError(*problems)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tile sizes, stages and warp partition of the forward kernel, and optionally of the backward ones."""

    tile_q: int | None = None
    tile_kv: int | None = None
    stages: int | None = None
    warps: WarpPartition | None = None
    backward: BackwardSchedule = BackwardSchedule()

    def __post_init__(self) -> None:
        problems = list(_tile_violations(self, ""))
        if self.warps is not None and not isinstance(self.warps, WarpPartition):
            problems.append(f"warps={show(self.warps)} is not a WarpPartition; use WarpPartition('split_q', 4)")
        if not isinstance(self.backward, BackwardSchedule):
            problems.append(
                f"backward={show(self.backward)} is not a BackwardSchedule; use BackwardSchedule(tile_q=64)"
            )
        if problems:
            raise SpecError(*problems)


@dataclass(frozen=True, slots=True)
class WarpPartition:
    """How a block's warps share a tile of scores.

    ``split_q`` (FlashAttention-2): each warp owns query rows, and no warp talks to another.
    ``split_k`` (FlashAttention-1): each warp owns key columns, and partial results merge in shared memory.
    """

    kind: PartitionKind
    count: int

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in ("split_q", "split_k"):
            problems.append(f"warp partition kind={show(self.kind)} is unknown; use 'split_q' or 'split_k'")
        if type(self.count) is not int or self.count not in WARP_COUNTS:
            problems.append(f"warp count={show(self.count)} is not supported; use 1, 2, 4, 8 or 16")
        if problems:
            raise SpecError(*problems)
