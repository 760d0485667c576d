"""``Schedule``: how a kernel is laid out on the machine. Anything left None is chosen by the plan's table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from flashgen.common.checks import is_one_of, is_whole
from flashgen.common.show import show
from flashgen.errors import SpecError

PartitionKind = Literal["split_q", "split_k", "specialized"]
Algorithm = Literal["standard", "naive", "fa1", "grid1d", "grid2d", "fa2", "fa3"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
Softmax = Literal["reference-max", "running-max"]
WARP_COUNTS = (1, 2, 4, 8, 16)
#: How many warps share a tile, and how many warpgroups compute, in a partition of which only the kind is given.
DEFAULT_WARPS, DEFAULT_CONSUMERS = 4, 2


def _tile_violations(schedule: Schedule | BackwardSchedule, prefix: str) -> Iterator[str]:
    for name in ("tile_q", "tile_kv"):
        value = getattr(schedule, name)
        if value is not None and (not is_whole(value, 16, 256) or value % 16):
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
    #: ``fa2``: every warp copies and computes, in both passes (all GPUs). ``fa3``: specialised warps, wgmma and TMA in
    #: the forward pass (sm_90a). The others, which these descend from, are for learning and comparing.
    algorithm: Algorithm | None = None
    #: Of fa3: where the factor taken out of a row's exponentials comes from. ``reference-max``: the row's first tile,
    #: unless later ones grow far beyond it. ``running-max``: the maximum so far.
    softmax: Softmax | None = None
    #: Of fa3: registers per thread of producers and consumers.
    registers: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        problems = list(_tile_violations(self, ""))
        if self.warps is not None and not isinstance(self.warps, WarpPartition):
            problems.append(f"warps={show(self.warps)} is not a WarpPartition; use WarpPartition('split_q', 4)")
        if not isinstance(self.backward, BackwardSchedule):
            problems.append(
                f"backward={show(self.backward)} is not a BackwardSchedule; use BackwardSchedule(tile_q=64)"
            )
        problems += self._hopper_violations()
        if problems:
            raise SpecError(*problems)

    def _hopper_violations(self) -> Iterator[str]:
        if self.algorithm is not None and not is_one_of(self.algorithm, ALGORITHMS):
            yield f"algorithm={show(self.algorithm)} is unknown; use one of {', '.join(ALGORITHMS)}"
        if self.softmax is not None and not is_one_of(self.softmax, ("reference-max", "running-max")):
            yield f"softmax={show(self.softmax)} is unknown; use 'reference-max' or 'running-max'"
        if self.registers is not None and not _are_registers(self.registers):
            yield (
                f"registers={show(self.registers)} cannot be given to warpgroups; use two multiples of 8 from 24 to "
                "240, of producers and of consumers, such as (24, 240)"
            )
        specialized = isinstance(self.warps, WarpPartition) and self.warps.kind == "specialized"
        algorithm = self.algorithm if is_one_of(self.algorithm, ALGORITHMS) else None
        is_fa3 = algorithm in (None, "fa3")
        if specialized and not is_fa3:
            yield f"warps.kind='specialized' is fa3's partition, and algorithm={algorithm!r}; leave one of them out"
        if algorithm == "fa3" and self.warps is not None and not specialized:
            yield (
                f"warps={show(self.warps)} is no partition of algorithm='fa3'; use "
                "WarpPartition('specialized', consumers=2)"
            )
        if not is_fa3 or (isinstance(self.warps, WarpPartition) and not specialized):
            for name in ("softmax", "registers"):
                if getattr(self, name) is not None:
                    yield f"{name}={show(getattr(self, name))} belongs to algorithm='fa3'; leave it out"


def _are_registers(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(type(n) is int and 24 <= n <= 240 and n % 8 == 0 for n in value)
    )


@dataclass(frozen=True, slots=True)
class WarpPartition:
    """How a block's warps share a tile of scores.

    ``split_q`` (FlashAttention-2): each of ``count`` warps owns query rows, and no warp talks to another.
    ``split_k`` (FlashAttention-1): each warp owns key columns, and partial results merge in shared memory.
    ``specialized`` (FlashAttention-3): warpgroups, four warps each; ``producers`` bring tiles, and each of
    ``consumers`` owns 64 query rows.

    Where only the kind is given, four warps share the tile, or two consumers compute.
    """

    kind: PartitionKind
    count: int | None = None
    producers: int | None = None
    consumers: int | None = None

    def __post_init__(self) -> None:
        if is_one_of(self.kind, ("specialized",)):
            problems = self._specialise()
        elif is_one_of(self.kind, ("split_q", "split_k")):
            problems = list(self._plain_violations())
        else:
            problems = [f"warp partition kind={show(self.kind)} is unknown; use 'split_q', 'split_k' or 'specialized'"]
            problems += [] if self.count is None else self._count_violations()
        if problems:
            raise SpecError(*problems)

    def _count_violations(self) -> Iterator[str]:
        if type(self.count) is not int or self.count not in WARP_COUNTS:
            yield f"warp count={show(self.count)} is not supported; use 1, 2, 4, 8 or 16"

    def _plain_violations(self) -> Iterator[str]:
        if self.count is None:
            object.__setattr__(self, "count", DEFAULT_WARPS)
        yield from self._count_violations()
        for name in ("producers", "consumers"):
            if getattr(self, name) is not None:
                yield (
                    f"warp partition {name}={show(getattr(self, name))} belongs to kind='specialized', "
                    f"not to {show(self.kind)}; leave it out"
                )

    def _specialise(self) -> list[str]:
        if self.consumers is None:
            object.__setattr__(self, "consumers", DEFAULT_CONSUMERS)
        problems = []
        producers = 1 if self.producers is None else self.producers
        if type(producers) is not int or producers != 1:
            problems.append(f"warp partition producers={show(self.producers)} is not supported; use 1")
        if self.consumers is None or type(self.consumers) is not int or not 1 <= self.consumers <= 3:
            problems.append(f"warp partition consumers={show(self.consumers)} is not supported; use 1, 2 or 3")
        elif self.count is not None and not is_whole(self.count, *[4 * (self.consumers + 1)] * 2):
            problems.append(
                f"warp count={show(self.count)} is not that of 1 producer and {self.consumers} consumers; leave it out"
            )
        else:
            object.__setattr__(self, "producers", 1)
            object.__setattr__(self, "count", 4 * (self.consumers + 1))
        return problems

    @property
    def warps(self) -> int:
        """How many warps a block has."""
        assert self.count is not None, "a valid partition has a count"
        return self.count
