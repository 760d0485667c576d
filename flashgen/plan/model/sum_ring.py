"""The workspace of a kernel that both sums dQ and finishes it: a ring of a few heads."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.model.parts import Problem

#: Multiprocessors of an H100 or H200. With fewer, the workspace is larger than needed.
BLOCKS = 132


@dataclass(frozen=True, slots=True)
class SumRing:
    """A ring of heads. It stays in the L2 cache, and the slot of a head is cleared when the head is finished.

    A head waits until the previous head in its slot is finished. Tiles are scheduled in order, section after section.
    No head waits for one of its own section, so some tile can always proceed.
    """

    #: Keys of a tile that adds to the sum.
    tile_kv: int
    #: Key heads of a section.
    section_heads: int
    #: Blocks that run at once.
    blocks: int = BLOCKS

    def tiles(self, problem: Problem, rows: int) -> int:
        """Tiles of so many queries in the ring."""
        if problem.packed_rows is not None:
            return problem.query_tiles(rows) * problem.heads_q
        return -(-problem.len_q // rows) * self.heads(problem)

    def heads(self, problem: Problem) -> int:
        """Query heads in the ring: twice as many as blocks work on at once, plus a section.

        All heads of packed sequences: of short ones, blocks work on more heads at once than of the longest.
        """
        all_heads = problem.batch * problem.heads_kv
        if problem.packed_rows is not None:
            return problem.batch * problem.heads_q
        if not all_heads:
            return 0
        tiles = -(-problem.len_kv // self.tile_kv) or 1
        in_flight = -(-2 * self.blocks // tiles)
        sections = -(-in_flight // self.section_heads) + 1
        return min(all_heads, sections * self.section_heads) * (problem.heads_q // problem.heads_kv)
