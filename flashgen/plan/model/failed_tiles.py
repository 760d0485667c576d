"""Flags of tiles of gradients that are not finite, which a repair kernel computes again."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.model.parts import Problem


@dataclass(frozen=True, slots=True)
class FailedTiles:
    """A flag for each tile of dQ and head, then one for each tile of dK and dV and head."""

    #: Rows of a tile of dQ, and of one of dK and dV.
    tile_q: int
    tile_kv: int

    def query_flags(self, problem: Problem) -> int:
        """The number of tiles of dQ."""
        return problem.query_tiles(self.tile_q) * problem.heads_q

    def flags(self, problem: Problem) -> int:
        """The number of all tiles."""
        return self.query_flags(problem) + problem.key_tiles(self.tile_kv) * problem.heads_kv
