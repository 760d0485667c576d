"""Cutting the last tiles of keys into parts, so that all blocks end at about the same time.

Tiles that take as long as one another go round by round, and in the last round many blocks may have none: 2,048 tiles
on 132 multiprocessors take 16 rounds, of which 15.5 are work.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.model import Problem

#: Multiprocessors of an H100 or H200; with fewer there is room to spare.
BLOCKS = 132
#: Steps that a part has at least, and how many its sums take besides.
_LEAST_STEPS = 4
_EXTRA_STEPS = 3
#: Parts of a tile at most.
_MOST_PARTS = 32
#: Warps that sum their rows of dK and dV, each for itself.
_WARPS = 8
#: Floats that the copy engine's lines of the workspace are counted in.
_WHOLE = 512


@dataclass(frozen=True, slots=True)
class KeyParts:
    """Each part has some of a tile's steps; what it has of dK and dV is added to sums in the workspace."""

    #: Keys of a tile, and queries of a step.
    tile_kv: int
    tile_q: int
    #: Of dK and dV of a tile.
    tile_floats: int
    #: Blocks that have a tile each.
    blocks: int = BLOCKS

    def parts(self, problem: Problem) -> int:
        """Into how many each of those tiles is cut that are left when every block has had as many whole ones."""
        left = self._left(problem)
        steps = -(-problem.len_q // self.tile_q) * (problem.heads_q // problem.heads_kv if problem.heads_kv else 0)
        if left in (0, self._tiles(problem)):
            return 1

        def duration(parts: int) -> float:
            rounds = -(-left * parts // self.blocks)
            return rounds * (steps / parts + (_EXTRA_STEPS if parts > 1 else 0))

        return min(range(1, max(1, min(_MOST_PARTS, steps // _LEAST_STEPS)) + 1), key=duration)

    def whole_tiles(self, problem: Problem) -> int:
        """Tiles that are not cut; they come first."""
        return self._tiles(problem) - self._cut(problem)

    def floats(self, problem: Problem) -> int:
        """Of the workspace: sums of dK and dV of all tiles that are cut, and how many parts each warp has added."""
        floats = self._cut(problem) * (self.tile_floats + _WARPS)
        return -(-floats // _WHOLE) * _WHOLE

    def _cut(self, problem: Problem) -> int:
        return self._left(problem) if self.parts(problem) > 1 else 0

    def _left(self, problem: Problem) -> int:
        return self._tiles(problem) % self.blocks

    def _tiles(self, problem: Problem) -> int:
        return problem.batch * problem.heads_kv * -(-problem.len_kv // self.tile_kv)
