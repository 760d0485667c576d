"""Cutting the last tiles of keys into parts, so that all blocks end at about the same time.

Tiles that take as long as one another go round by round, and in the last round many blocks may have none: 2,048 tiles
on 132 multiprocessors take 16 rounds, of which 15.5 are work.

What the parts of a tile have of dK and dV is added up in memory, but in none of its own: heads that have no cut tile
are done with before, and sums of parts go where their dQ was summed, as if there were a few heads more.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.model.parts import Problem

#: Multiprocessors of an H100 or H200; with fewer there is room to spare.
BLOCKS = 132
#: The fewest steps of a part, and the cost of its sums in steps.
_LEAST_STEPS = 4
_EXTRA_STEPS = 3
#: The most parts of a tile.
_MOST_PARTS = 32
#: Warps that sum their rows of dK and dV, each for itself.
_WARPS = 8
#: Words in one box of the TMA map of the workspace.
_WHOLE = 512


@dataclass(frozen=True, slots=True)
class KeyParts:
    """Each part has some of a tile's steps; what it has of dK and dV is added to sums in the workspace."""

    #: Keys of a tile, and queries of a step.
    tile_kv: int
    tile_q: int
    #: Of dK and dV of a tile, and of dQ of a step.
    tile_floats: int
    step_floats: int
    #: Blocks that have a tile each.
    blocks: int = BLOCKS

    def parts(self, problem: Problem) -> int:
        """The number of parts of each tile that remains after every block has had an equal number of whole tiles."""
        left = self._left(problem)
        if left in (0, self._tiles(problem)) or not self._have_room(left, problem):
            return 1
        steps = self._steps(problem)

        def duration(parts: int) -> float:
            rounds = -(-left * parts // self.blocks)
            return rounds * (steps / parts + (_EXTRA_STEPS if parts > 1 else 0))

        return min(range(1, max(1, min(_MOST_PARTS, steps // _LEAST_STEPS)) + 1), key=duration)

    def whole_tiles(self, problem: Problem) -> int:
        """Tiles that are not cut. They come first."""
        return self._tiles(problem) - self._cut(problem)

    def whole_heads(self, problem: Problem) -> int:
        """Heads of keys that have only whole tiles."""
        return self._whole_heads(self._cut(problem), problem)

    def heads(self, problem: Problem) -> int:
        """For how many heads of keys, besides those that there are, the sums of parts are counted."""
        cut = self._cut(problem)
        return self._heads_for(cut, problem) if cut else 0

    def sums_of_head(self, problem: Problem) -> int:
        """Tiles whose dK and dV take as much as dQ of one head of keys does, with all that share it."""
        return self._steps(problem) * self.step_floats // self.tile_floats

    def counts(self, problem: Problem) -> int:
        """Of parts of each tile that is cut, as each warp has added them: words of the workspace, behind all sums."""
        return -(-self._cut(problem) * _WARPS // _WHOLE) * _WHOLE

    def _have_room(self, cut: int, problem: Problem) -> bool:
        """Whether so many tiles' sums find a place: a part waits until a head is done with that has only whole
        tiles, as it could wait for itself otherwise."""
        has_any = self.sums_of_head(problem) > 0
        return has_any and self._heads_for(cut, problem) <= self._whole_heads(cut, problem)

    def _heads_for(self, cut: int, problem: Problem) -> int:
        return -(-cut // self.sums_of_head(problem))

    def _whole_heads(self, cut: int, problem: Problem) -> int:
        return (self._tiles(problem) - cut) // self._tiles_of_head(problem)

    def _steps(self, problem: Problem) -> int:
        return -(-problem.len_q // self.tile_q) * (problem.heads_q // problem.heads_kv if problem.heads_kv else 0)

    def _cut(self, problem: Problem) -> int:
        return self._left(problem) if self.parts(problem) > 1 else 0

    def _left(self, problem: Problem) -> int:
        return self._tiles(problem) % self.blocks

    def _tiles(self, problem: Problem) -> int:
        return problem.batch * problem.heads_kv * self._tiles_of_head(problem)

    def _tiles_of_head(self, problem: Problem) -> int:
        return -(-problem.len_kv // self.tile_kv)
