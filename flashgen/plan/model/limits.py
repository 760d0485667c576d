"""Choosing a tiling, and error messages for those that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flashgen.arch import Arch
from flashgen.errors import PlanError


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes, warps and stages: a row of the schedule tables."""

    tile_q: int
    tile_kv: int
    warps: int
    stages: int
    reason: str = ""
    #: Keep the fragments of Q in registers.
    hold_q: bool = False
    #: How many blocks should share a multiprocessor for the row to be worth choosing.
    blocks: int = 1

    def describe(self) -> str:
        """For messages: ``tile_q=128, tile_kv=64, stages=2, warps=4``."""
        return f"tile_q={self.tile_q}, tile_kv={self.tile_kv}, stages={self.stages}, warps={self.warps}"


#: Says what is wrong with a tiling (in a sentence), or None.
Check = Callable[[Tiling], "str | None"]
#: Bytes of shared memory of a tiling.
Size = Callable[[Tiling], int]


def choose(kernel: str, rows: Sequence[Tiling], given: dict[str, int], arch: Arch, check: Check, size: Size) -> Tiling:
    """The first row that passes the check, with the values that the user gave; else a PlanError.

    Rows that reach the number of blocks per multiprocessor that they ask for come first.
    """
    candidates = [replace(row, **given) for row in rows]  # type: ignore[arg-type]
    for candidate in [c for c in candidates if _shares(c, arch, size)] + candidates:
        if check(candidate) is None:
            return candidate
    fitting = next((row for row in rows if check(row) is None), None)
    remedy = f" What would fit: {fitting.describe()}." if fitting else ""
    problem = next(fault for fault in map(check, candidates) if fault)
    raise PlanError(f"The {kernel} kernel cannot be planned: {problem}{remedy}")


def _shares(tiling: Tiling, arch: Arch, size: Size) -> bool:
    needed = size(tiling) + arch.reserved_smem_per_block
    return tiling.blocks * needed <= arch.smem_per_multiprocessor


def smem_fault(arch: Arch, tiling: Tiling, needed: int) -> str | None:
    """Why shared memory does not suffice, in a sentence; None if it does."""
    if needed <= arch.max_smem_per_block:
        return None
    return (
        f"{tiling.describe()} needs {needed} bytes of shared memory per block, but {arch.name} has "
        f"{arch.max_smem_per_block}; use smaller tiles or fewer stages."
    )


def stages_fault(arch: Arch, tiling: Tiling) -> str:
    """The sentence for several stages without cp.async."""
    return (
        f"stages={tiling.stages} needs asynchronous copies of at least 4 bytes, which {arch.name} lacks "
        "with these head dims and alignments; use stages=1."
    )
