"""Into how many parts keys are split."""

from __future__ import annotations

import pytest

from flashgen.plan.splits import choose_splits
from flashgen.spec.kvcache import MOST_SPLITS


@pytest.mark.parametrize(
    ("blocks", "key_tiles", "at_once"),
    [
        (0, 100, 132),  # nothing to do
        (8, 1, 132),  # nothing to split
        (8, 0, 132),
        (132, 1000, 132),  # full without
        (500, 1000, 132),
        (8, 4, 132),  # too short to pay for the combining
    ],
)
def test_keys_stay_together_where_splitting_gains_nothing(blocks: int, key_tiles: int, at_once: int) -> None:
    assert choose_splits(blocks, key_tiles, at_once) == 1


@pytest.mark.parametrize(("blocks", "key_tiles"), [(1, 64), (8, 128), (8, 2048), (48, 300), (100, 10_000)])
def test_long_keys_fill_the_gpu_in_whole_waves(blocks: int, key_tiles: int) -> None:
    splits = choose_splits(blocks, key_tiles, 132)
    assert 1 < splits <= min(key_tiles, MOST_SPLITS)
    # No fewer would end as soon: the last wave has work for most of the GPU.
    waves = -(-blocks * splits // 132)
    assert blocks * splits > 0.5 * waves * 132 or splits == key_tiles
    steps = waves * -(-key_tiles // splits)
    assert steps < key_tiles


def test_of_equally_good_numbers_the_smallest_is_taken() -> None:
    # 64 tiles for 33 or more blocks are two each, as for 32.
    assert choose_splits(1, 64, 40) == 32
