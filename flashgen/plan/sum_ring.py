"""Where dQ is summed when the kernel that sums it also finishes it: for a few heads at a time."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.model import Problem

#: Fewest steps of a part of a tile of keys, and how many a part costs besides.
_PART_STEPS = 4
_PART_COST = 3
#: Parts that a tile of keys is cut into at most.
_MOST_PARTS = 32
#: Warps that add their rows of dK and dV by themselves.
_WARPS = 8

#: What the copy engine takes of the workspace at a time.
SUM_LINES = 512

#: Multiprocessors of an H100 or H200; with fewer there is room to spare.
_BLOCKS = 132


@dataclass(frozen=True, slots=True)
class SumRing:
    """Heads take turns in the workspace: it stays in the cache, and is cleared as each head is finished.

    A head waits for the one that had its place before. Tiles are given out in order, section after section; as
    a section never waits for itself, there is always a tile that nothing holds up.
    """

    #: Keys of a tile that adds to the sum.
    tile_kv: int
    #: Heads of keys whose tiles are given out at the same time.
    section_heads: int
    #: Blocks that have a tile each.
    blocks: int = _BLOCKS
    #: Queries of a step, where tiles of keys may be cut.
    tile_q: int | None = None
    #: Floats of dK and dV of a tile of keys.
    key_floats: int = 0

    @property
    def cuts(self) -> bool:
        """Whether the last tiles of keys are cut, so that blocks end together."""
        return self.tile_q is not None

    def tiles(self, problem: Problem) -> int:
        """Of keys, of all heads."""
        return problem.batch * problem.heads_kv * -(-problem.len_kv // self.tile_kv)

    def parts(self, problem: Problem) -> int:
        """How many parts each tile is cut into of those that are left when all blocks have had as many whole ones."""
        left = self._left(problem)
        if self.tile_q is None or not left or left == self.tiles(problem):
            return 1
        steps = -(-problem.len_q // self.tile_q) * (problem.heads_q // problem.heads_kv)

        def duration(parts: int) -> float:
            cost = _PART_COST if parts > 1 else 0
            return -(-left * parts // self.blocks) * (steps / parts + cost)

        possible = range(1, max(1, min(_MOST_PARTS, steps // _PART_STEPS)) + 1)
        return min(possible, key=duration)

    def whole_tiles(self, problem: Problem) -> int:
        """Tiles that are not cut; they come first."""
        return self.tiles(problem) - (self._left(problem) if self.parts(problem) > 1 else 0)

    def part_floats(self, problem: Problem) -> int:
        """Of the workspace, behind sums of dQ: sums of dK and dV of tiles that are cut, and a count for each warp."""
        cut = self.tiles(problem) - self.whole_tiles(problem)
        floats = cut * (self.key_floats + _WARPS)
        return -(-floats // SUM_LINES) * SUM_LINES

    def _left(self, problem: Problem) -> int:
        return self.tiles(problem) % self.blocks

    def heads(self, problem: Problem) -> int:
        """For how many heads of queries there is room: twice as many as blocks work on, and a section."""
        all_heads = problem.batch * problem.heads_kv
        if not all_heads:
            return 0
        tiles = -(-problem.len_kv // self.tile_kv) or 1
        under_way = -(-2 * self.blocks // tiles)
        sections = -(-under_way // self.section_heads) + 1
        return min(all_heads, sections * self.section_heads) * (problem.heads_q // problem.heads_kv)
