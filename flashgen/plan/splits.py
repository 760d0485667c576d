"""Chooses the number of splits of the keys for calls that leave it open."""

from __future__ import annotations

from dataclasses import replace

from flashgen.plan.model.plans import KernelPlan, Problem
from flashgen.spec.kvcache import MOST_SPLITS

#: Overhead of a block outside its loop over tiles of keys, and the cost of combining, both in tiles of keys.
_BLOCK_COST = 2
_COMBINE_COST = 4


def with_splits(problem: Problem, asked: int, forward: KernelPlan, multiprocessors: int) -> Problem:
    """The problem with ``asked`` splits, or with the best number for the GPU if that is 0."""
    blocks = -(-problem.len_q // forward.grid_tile) * problem.heads_q * problem.batch
    key_tiles = -(-problem.len_kv // int(forward.constant("tile_kv")))
    return replace(problem, splits=asked or choose_splits(blocks, key_tiles, multiprocessors))


def choose_splits(blocks: int, key_tiles: int, at_once: int) -> int:
    """The number of splits with the least estimated time: waves of blocks times tiles of keys per block.

    ``at_once`` blocks run concurrently. If the blocks fill the GPU without splits, there is one. Ties go to the
    smallest number.
    """
    if blocks <= 0 or key_tiles <= 1 or blocks >= at_once:
        return 1

    def cost(splits: int) -> int:
        waves = -(-blocks * splits // at_once)
        tiles = -(-key_tiles // splits)
        return waves * (tiles + _BLOCK_COST) + (_COMBINE_COST if splits > 1 else 0)

    return min(range(1, min(key_tiles, MOST_SPLITS) + 1), key=cost)
