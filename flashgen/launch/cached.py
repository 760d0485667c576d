"""Forward calls whose keys and values lie in a cache: their sizes, splits and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashgen.launch.array import ArrayInfo
from flashgen.launch.cache_arrays import capacity
from flashgen.launch.call import Output
from flashgen.launch.packed import band_values
from flashgen.launch.packing import Value
from flashgen.plan.model import KernelPlan, Problem
from flashgen.plan.splits import choose_splits
from flashgen.spec import Mask


def with_room(problem: Problem, arrays: Sequence[ArrayInfo], k: ArrayInfo) -> Problem:
    """The sizes of a call, with as many keys as each sequence has room for."""
    return replace(problem, len_kv=capacity(arrays, k))


def with_splits(problem: Problem, asked: int, forward: KernelPlan, multiprocessors: int) -> Problem:
    """The sizes with the number of splits: as asked for, or if that is 0 what suits the GPU."""
    blocks = -(-problem.len_q // forward.grid_tile) * problem.heads_q * problem.batch
    key_tiles = -(-problem.len_kv // int(forward.constant("tile_kv")))
    return replace(problem, splits=asked or choose_splits(blocks, key_tiles, multiprocessors))


def cached_values(mask: Mask, arrays: Sequence[ArrayInfo], k: ArrayInfo, splits: int) -> dict[str | None, Value]:
    """The parameters that only calls with a cache have, but for the addresses."""
    table_row = next((a.strides[0] for a in arrays if a.name == "block_table"), 0)
    return {"splits": splits, "page_size": k.shape[1], "table_row": table_row, **band_values(mask)}


def partial_outputs(problem: Problem, head_dim_v: int) -> tuple[Output, ...]:
    """Where splits leave their results; without splits nothing does."""
    rows = 0 if problem.splits == 1 else problem.splits * problem.batch * problem.heads_q * problem.len_q
    return Output("o_partial", (rows * head_dim_v,), "fp32"), Output("lse_partial", (rows,), "fp32")
