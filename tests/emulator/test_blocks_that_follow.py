"""How many blocks of keys the producer of a Hopper forward kernel expects after each one that it visits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

TILE_KV = 64
PRELUDE = """#include "flashgen/sm90/key_blocks.cuh"
namespace flashgen {
constexpr ForwardSm90Config kTiles{.tile_q = 64, .tile_kv = 64, .consumers = 1};
// A bit of `params.words` for each block of keys: whether it holds allowed pairs.
struct BlockMask {
  struct Span {
    i32 begin, end;
    Span of_lane(i32) const { return *this; }
  };
  const u32* words;
  i32 blocks;
  Range key_tiles(i32, i32, i32) const { return {0, blocks}; }
  Span queries_in(i32 begin, i32 end) const { return {begin, end}; }
  Span keys_in(i32 begin, i32 end) const { return {begin, end}; }
  bool is_empty(const Span&, const Span& keys) const {
    const i32 block = keys.begin / kTiles.tile_kv;
    return block >= blocks || (words[block / 32] >> block % 32 & 1u) == 0;
  }
  bool is_full(const Span&, const Span&) const { return false; }
};
struct BlockTile {
  i32 first_q;
  BlockMask of;
  i32 len_q(const auto&) const { return 64; }
  template <class Mask>
  Mask mask(const auto&) const { return of; }
};
}
"""


def visits(run: Any, blocks: int, allowed: Collection[int]) -> list[tuple[int, int]]:
    """Each visited block, and how many follow as far as the producer knows."""
    words = np.zeros(-(-blocks // 32), np.uint32)
    for block in allowed:
        words[block // 32] |= np.uint32(1 << block % 32)
    found = np.full((blocks + 1, 2), -1, np.int32)
    run(
        f"""const BlockTile tile = {{0, {{words, {blocks}}}}};
        i32 count = 0;
        SparseBlocks<kTiles, BlockMask>::for_each(params, tile, Thread::current(), [&](i32 block, i32 left, auto) {{
          if (thread_idx() == 0) {{
            found[2 * count] = block;
            found[2 * count + 1] = left;
          }}
          ++count;
        }});""",
        prelude=PRELUDE,
        words=words,
        found=found.reshape(-1),
    )
    return [(block, left) for block, left in found.tolist() if block >= 0]


@pytest.mark.parametrize("allowed", [(0,), (5,), (3, 4, 9), tuple(range(0, 32, 3)), tuple(range(32))])
def test_of_a_sparse_mask_all_blocks_that_follow_among_32_are_known(run: Any, allowed: tuple[int, ...]) -> None:
    expected = [(block, len(allowed) - 1 - i) for i, block in enumerate(allowed)]
    assert visits(run, 32, allowed) == expected


@pytest.mark.parametrize("allowed", [tuple(range(100)), (2, 3, 40, 99), (1, 31, 64), tuple(range(20, 45))])
def test_beyond_32_blocks_of_a_sparse_mask_only_the_last_one_has_no_follower(
    run: Any, allowed: tuple[int, ...]
) -> None:
    found = visits(run, 100, allowed)
    assert [block for block, _ in found] == list(allowed)
    for i, (_, left) in enumerate(found):
        following = len(allowed) - 1 - i
        assert min(1, following) <= left <= following


def test_a_tile_without_allowed_pairs_visits_one_block(run: Any) -> None:
    assert visits(run, 40, ()) == [(0, 0)]
