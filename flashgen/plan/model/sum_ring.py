"""Where dQ is summed when the kernel that sums it also finishes it: for a few heads at a time."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.model.key_parts import BLOCKS, KeyParts
from flashgen.plan.model.parts import Problem


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
    blocks: int = BLOCKS
    #: How the last tiles of keys are cut, if they are.
    cuts: KeyParts | None = None

    def heads(self, problem: Problem) -> int:
        """For how many heads of queries there is room: twice as many as blocks work on, and a section."""
        all_heads = problem.batch * problem.heads_kv
        if not all_heads:
            return 0
        tiles = -(-problem.len_kv // self.tile_kv) or 1
        under_way = -(-2 * self.blocks // tiles)
        sections = -(-under_way // self.section_heads) + 1
        wanted = max(sections * self.section_heads, self._heads_of_parts(problem, all_heads))
        return min(all_heads, wanted) * (problem.heads_q // problem.heads_kv)

    def _heads_of_parts(self, problem: Problem, all_heads: int) -> int:
        """For so many heads of keys that sums of parts have places of heads whose tiles are whole."""
        if self.cuts is None or not self.cuts.heads(problem):
            return 0
        return all_heads + self.cuts.heads(problem) - self.cuts.whole_heads(problem)
