"""The order in which tiles are given out, where blocks stay and draw one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

SECTION = 16
TILES_OF_HEAD = 5


def places(run: Any, heads: int, section: int = SECTION) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The turn and the head of each number."""
    tiles = heads * TILES_OF_HEAD
    out = np.full((tiles, 2), -1, np.int32)
    body = f"""for (i32 number = thread_idx(); number < {tiles}; number += 32) {{
      const SectionTile place = section_tile<{section}>(number, {tiles}, {TILES_OF_HEAD});
      out[2 * number] = place.turn;
      out[2 * number + 1] = place.head;
    }}"""
    run(body, prelude='#include "flashgen/sm90/sections.cuh"', out=out.reshape(-1))
    return out


@pytest.mark.parametrize("heads", [1, 7, 16, 17, 31, 32, 33, 40, 66])
def test_each_tile_is_given_out_once(run: Any, heads: int) -> None:
    found = {(turn, head) for turn, head in places(run, heads).tolist()}
    assert found == {(turn, head) for turn in range(TILES_OF_HEAD) for head in range(heads)}


@pytest.mark.parametrize("heads", [7, 16, 17, 33, 40, 66])
def test_the_last_section_is_a_whole_one(run: Any, heads: int) -> None:
    # A few heads by themselves at the end would leave most blocks nothing to do, while their long tiles take time.
    last = min(heads, SECTION)
    end = places(run, heads)[-last * TILES_OF_HEAD :]
    assert len(set(end[:, 1].tolist())) == last
    # Within it the tile changes slowest.
    np.testing.assert_array_equal(end[:, 0], np.repeat(np.arange(TILES_OF_HEAD), last))


def test_tiles_of_a_head_follow_each_other_where_it_is_a_section_of_its_own(run: Any) -> None:
    expected = [(turn, head) for head in range(7) for turn in range(TILES_OF_HEAD)]
    assert [tuple(place) for place in places(run, 7, section=1).tolist()] == expected
