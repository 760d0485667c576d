"""Cutting the last tiles of keys into parts, so that all blocks end at about the same time.

Tiles of equal length run in waves, and in the last wave many blocks are idle: 2,048 tiles on 132 multiprocessors take
16 waves for 15.5 waves of work.

dK and dV of the parts of a tile are summed in memory. No extra memory is needed: by then heads without a cut tile are
finished, and the sums use the part of the workspace that held their dQ. They are numbered like further heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.model.parts import Problem

#: Multiprocessors of an H100 or H200. With fewer, the workspace is larger than needed.
BLOCKS = 132
#: The fewest steps of a part, and the cost of its sums in steps.
_LEAST_STEPS = 4
_EXTRA_STEPS = 3
#: The most parts of a tile.
_MOST_PARTS = 32
#: Consumer warps. Each adds its own rows of dK and dV.
_WARPS = 8
#: Words in one box of the TMA map of the workspace.
_WHOLE = 512


@dataclass(frozen=True, slots=True)
class KeyParts:
    """How tiles of keys are cut: each part takes some of a tile's steps, and adds its dK and dV to sums."""

    #: Keys of a tile, and queries of a step.
    tile_kv: int
    tile_q: int
    #: Floats of dK and dV of a tile, and of dQ of a step.
    tile_floats: int
    step_floats: int
    #: Blocks that run at once.
    blocks: int = BLOCKS

    def parts(self, problem: Problem) -> int:
        """The number of parts of each tile of the last, incomplete wave; 1 if tiles are not cut."""
        left = self._left(problem)
        if left in (0, self._tiles(problem)) or not self._have_room(left, problem):
            return 1
        steps = self._steps(problem)

        def duration(parts: int) -> float:
            waves = -(-left * parts // self.blocks)
            return waves * (steps / parts + (_EXTRA_STEPS if parts > 1 else 0))

        return min(range(1, max(1, min(_MOST_PARTS, steps // _LEAST_STEPS)) + 1), key=duration)

    def whole_tiles(self, problem: Problem) -> int:
        """The number of tiles that are not cut. They come first."""
        return self._tiles(problem) - self._cut(problem)

    def whole_heads(self, problem: Problem) -> int:
        """The number of key heads without a cut tile."""
        return self._whole_heads(self._cut(problem), problem)

    def heads(self, problem: Problem) -> int:
        """The number of further key heads that the sums of parts are numbered as."""
        cut = self._cut(problem)
        return self._heads_for(cut, problem) if cut else 0

    def sums_of_head(self, problem: Problem) -> int:
        """The number of tiles whose dK and dV fit where dQ of one key head's group was summed."""
        return self._steps(problem) * self.step_floats // self.tile_floats

    def counts(self, problem: Problem) -> int:
        """Words behind all sums: for each cut tile and warp, a count of the parts that have been added."""
        return -(-self._cut(problem) * _WARPS // _WHOLE) * _WHOLE

    def _have_room(self, cut: int, problem: Problem) -> bool:
        """Whether the sums fit where heads without a cut tile were summed. A part waits until such a head is finished;
        waiting for a head with a cut tile could deadlock."""
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
