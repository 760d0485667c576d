"""Into how many parts the keys of a call are split, where it does not say."""

from __future__ import annotations

from dataclasses import replace

from flashgen.plan.model.plans import KernelPlan, Problem
from flashgen.spec.kvcache import MOST_SPLITS

#: What a block spends before its first tile of keys and after its last, and what combining costs, in tiles of keys.
_BLOCK_COST = 2
_COMBINE_COST = 4


def with_splits(problem: Problem, asked: int, forward: KernelPlan, multiprocessors: int) -> Problem:
    """The sizes with the number of splits: as asked for, or if that is 0 what suits the GPU."""
    blocks = -(-problem.len_q // forward.grid_tile) * problem.heads_q * problem.batch
    key_tiles = -(-problem.len_kv // int(forward.constant("tile_kv")))
    return replace(problem, splits=asked or choose_splits(blocks, key_tiles, multiprocessors))


def choose_splits(blocks: int, key_tiles: int, at_once: int) -> int:
    """The number of splits by which ``blocks`` blocks of ``key_tiles`` tiles each end first.

    ``at_once`` blocks run at a time. Where the GPU is full without, keys are not split; of equally good numbers the
    smallest is taken.
    """
    if blocks <= 0 or key_tiles <= 1 or blocks >= at_once:
        return 1

    def cost(splits: int) -> int:
        waves = -(-blocks * splits // at_once)
        tiles = -(-key_tiles // splits)
        return waves * (tiles + _BLOCK_COST) + (_COMBINE_COST if splits > 1 else 0)

    return min(range(1, min(key_tiles, MOST_SPLITS) + 1), key=cost)
