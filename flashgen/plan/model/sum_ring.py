"""The workspace of a kernel that both sums dQ and finishes it: a ring of a few heads."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.model.key_parts import BLOCKS, KeyParts
from flashgen.plan.model.parts import Problem


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
    #: How the last tiles of keys are cut, if they are.
    cuts: KeyParts | None = None

    def heads(self, problem: Problem) -> int:
        """Query heads in the ring: twice as many as blocks work on at once, plus a section."""
        all_heads = problem.batch * problem.heads_kv
        if not all_heads:
            return 0
        tiles = -(-problem.len_kv // self.tile_kv) or 1
        in_flight = -(-2 * self.blocks // tiles)
        sections = -(-in_flight // self.section_heads) + 1
        wanted = max(sections * self.section_heads, self._heads_of_parts(problem, all_heads))
        return min(all_heads, wanted) * (problem.heads_q // problem.heads_kv)

    def _heads_of_parts(self, problem: Problem, all_heads: int) -> int:
        """Key heads so that sums of parts reuse only slots of heads without a cut tile."""
        if self.cuts is None or not self.cuts.heads(problem):
            return 0
        return all_heads + self.cuts.heads(problem) - self.cuts.whole_heads(problem)
