"""``fg.lab.estimate``: its counts are those of brute force over every pair."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen as fg
from flashgen.oracle import Rules
from flashgen.plan.model.plans import Problem

MASKS = {
    "full": fg.full(),
    "causal": fg.causal(),
    "causal from the top left": fg.causal("top-left"),
    "window": fg.window(30, 5),
    "both alignments": fg.window(20, 0) & fg.window(40, 9, align="top-left"),
    "chunks": fg.chunked(50),
}


@pytest.mark.parametrize("lengths", [(200, 200), (90, 300), (300, 90), (1, 1)])
@pytest.mark.parametrize("name", MASKS)
def test_processed_tiles_are_those_with_an_allowed_pair(name: str, lengths: tuple[int, int]) -> None:
    found = fg.lab.estimate(*lengths, 32, 48, mask=MASKS[name], head_dim=16)
    allowed = Rules(fg.AttentionSpec(16, mask=MASKS[name]), Problem(1, 1, 1, *lengths)).allowed(0, 0)
    tiles = [allowed[q : q + 32, k : k + 48] for q in range(0, lengths[0], 32) for k in range(0, lengths[1], 48)]
    assert found.processed == sum(bool(tile.any()) for tile in tiles)
    assert found.full == sum(bool(tile.all()) for tile in tiles)
    assert found.tiles == len(tiles)


def test_work_and_memory_follow_from_the_tiles() -> None:
    found = fg.lab.estimate(100, 60, 64, 32, mask=fg.causal(), head_dim=16, dtype="fp32")
    # Query q reaches the keys up to q - 40.
    assert (found.empty, found.partial, found.full) == (1, 3, 0)
    assert found.naive_scores == 6000
    assert found.tile_scores == 3 * 64 * 32
    assert found.relative_work == 3 * 64 * 32 / 6000
    assert found.flops == 4 * 16 * 3 * 64 * 32
    assert found.workspace_saved == 4 * 6000
    assert found.tile_bytes == 4 * 16 * (64 + 32 + 32)
    assert found.as_dict()["processed"] == 3


def test_the_tile_and_the_keys_may_be_left_out() -> None:
    found = fg.lab.estimate(512, mask=fg.causal(), head_dim=128)
    explanation = fg.explain(fg.AttentionSpec(128, mask=fg.causal()), 512, arch="sm_80")
    assert found == fg.lab.Estimate.of(explanation)
    assert (found.len_kv, found.tile_q) == (512, explanation.tile_q)


def test_a_mask_may_be_a_function() -> None:
    by_function = fg.lab.estimate(200, 200, 32, 32, mask=lambda b, h, q, k: q >= k)
    by_name = fg.lab.estimate(200, 200, 32, 32, mask=fg.causal())
    assert (by_function.partial, by_function.full) == (by_name.partial, by_name.full)


def test_it_prints_itself() -> None:
    assert str(fg.lab.estimate(4096, 4096, 128, 64, mask=fg.causal(), head_dim=128)) == (
        "mask             causal, 4,096 queries x 4,096 keys\n"
        "tiles processed  1,056 of 2,048 (992 skipped, 64 partial, 992 full)\n"
        "naive scores     16,777,216\n"
        "relative work    0.5156 (8,650,752 scores)\n"
        "operations       4,429,185,024\n"
        "workspace saved  33,554,432 bytes\n"
        "tiles on chip    65,536 bytes for 128 x 64"
    )


def test_lengths_of_zero_have_no_tiles() -> None:
    found = fg.lab.estimate(0, 64, 16, 16)
    assert (found.tiles, found.relative_work, found.flops) == (0, 0.0, 0)


def test_half_a_tile_is_refused() -> None:
    with pytest.raises(fg.ArgumentError, match="tile_q=64 comes alone; give both tile_q and tile_kv, or neither"):
        fg.lab.estimate(64, 64, 64)
    with pytest.raises(fg.ArgumentError, match="tile_kv=32 comes alone"):
        fg.lab.estimate(64, 64, tile_kv=32)
    with pytest.raises(fg.ArgumentError, match="tile keys=0 is out of range"):
        fg.lab.estimate(64, 64, 64, 0)
    with pytest.raises(fg.SpecError, match="dtype='int8'"):
        fg.lab.estimate(64, dtype="int8")
    with pytest.raises(fg.ArgumentError, match="len_q="):
        fg.lab.estimate(np.zeros(3))  # type: ignore[arg-type]
