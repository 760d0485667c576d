"""Walks over tiles against the map of tiles that ``explain`` draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.explanation import EMPTY
from flashgen.lab.io.visits import Side, walk

MASKS: dict[str, Any] = {
    "full": fg.full(),
    "causal": fg.causal(),
    "top-left": fg.causal(align="top-left"),
    "window": fg.window(50, 20),
    "prefix": fg.prefix_lm(70),
    "blocks": fg.Mask.of(lambda b, h, q, k: (q // 96 == k // 96) | (k < 10)),
}


@pytest.mark.parametrize(("len_q", "len_kv"), [(300, 300), (333, 129), (50, 400), (1, 1)])
@pytest.mark.parametrize("name", MASKS)
def test_a_walk_over_keys_visits_the_tiles_of_the_map(name: str, len_q: int, len_kv: int) -> None:
    visited = fg.explain(MASKS[name], len_q, len_kv, tile=(64, 48)).kinds != EMPTY
    keys = Side("k", len_kv, 48)
    found = walk(MASKS[name], 2, 3, Side("q", len_q, 64), keys)
    np.testing.assert_array_equal(found.steps, 6 * visited.sum(axis=1))
    np.testing.assert_array_equal(found.rows, 6 * (visited @ keys.rows))
    np.testing.assert_array_equal(found.idle, 6 * ~visited.any(axis=1))


@pytest.mark.parametrize("name", ["full", "causal", "window", "blocks"])
def test_a_walk_over_queries_visits_the_same_tiles(name: str) -> None:
    visited = fg.explain(MASKS[name], 333, 290, tile=(64, 48)).kinds != EMPTY
    found = walk(MASKS[name], 1, 1, Side("k", 290, 48), Side("q", 333, 64))
    np.testing.assert_array_equal(found.steps, visited.sum(axis=0))


def test_a_mask_that_differs_by_head_is_walked_for_each() -> None:
    mask = fg.Mask.of(lambda b, h, q, k: k < 64 * (h + 2 * b))
    found = walk(mask, 2, 2, Side("q", 64, 64), Side("k", 256, 64))
    assert found.steps.tolist() == [0 + 1 + 2 + 3]
    assert found.idle.tolist() == [1]
