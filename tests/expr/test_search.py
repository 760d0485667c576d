"""Loops over keys or queries that begin and end where elements of a captured tensor do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashgen.expr.readings.numpy import evaluate, evaluate_all
from flashgen.expr.readings.tiles import tile_rule
from flashgen.expr.tree.nodes import Node
from flashgen.expr.tree.text import text

Array = np.ndarray[Any, Any]
Parse = Callable[[str], Node]


def bounds_of(mask: Node, env: dict[str, Any], tile: int, axis: str) -> list[tuple[int, int]]:
    """Begin and end of the loop over one index, for each tile of the other."""
    rule = tile_rule(mask)
    ends = (rule.key_begin, rule.key_end) if axis == "k" else (rule.query_begin, rule.query_end)
    other = "q" if axis == "k" else "k"
    low = np.arange(0, env[f"{other}_len"], tile)
    high = np.minimum(low + tile, env[f"{other}_len"]) - 1
    begin, end = evaluate_all(list(ends), {**env, f"{other}_lo": low, f"{other}_hi": high})
    return [(int(a), int(b)) for a, b in zip(*np.broadcast_arrays(begin, end), strict=True)]


#: Ids along a sequence of 40: in order, with documents that end where tiles do, and as documents never are.
ORDERS: dict[str, Array] = {
    "in order": np.repeat([-3, -1, 4, 9], [5, 12, 8, 15]),
    "ends of tiles": np.repeat([0, 1, 2, 3, 4], 8),
    "nearly in order": np.where(np.arange(40) == 11, 9, np.repeat([-3, -1, 4, 9], [5, 12, 8, 15])),
    "backwards": np.repeat([5, 3, -2], [10, 20, 10]),
    "in any order": np.random.default_rng(4).integers(-2, 4, 40),
    "all the same": np.zeros(40, int),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", ["ids[b, q] == ids[b, k]", "(ids[b, q] == ids[b, k]) & (q >= k)"])
def test_loops_over_documents_begin_and_end_with_them(read: Parse, order: str, source: str) -> None:
    mask, ids = read(source), ORDERS[order]
    env = {"ids": ids[None], "b": 0, "h": 0, "q_len": 40, "k_len": 40}
    allowed = evaluate(mask, {**env, "q": np.arange(40)[:, None], "k": np.arange(40)[None, :]})
    for tile, (axis, pairs) in itertools.product((1, 5, 8, 16), (("k", allowed), ("q", allowed.T))):
        for i, (begin, end) in enumerate(bounds_of(mask, env, tile, axis)):
            needed = np.flatnonzero(pairs[i * tile : (i + 1) * tile].any(axis=0))
            assert 0 <= begin <= needed[0] <= needed[-1] < end <= 40
            if order in ("in order", "ends of tiles", "all the same"):
                assert (begin, end) == (needed[0], needed[-1] + 1)


@pytest.mark.parametrize(
    ("source", "begin", "end"),
    [
        ("ids[b, k] >= w", "first(ids[b, :] >= w)", "k_len"),
        ("2 * ids[b, k] <= w", "0", "minimum(k_len, last(ids[b, :] <= w // 2) + 1)"),
        ("-ids[b, k] < 3", "first(ids[b, :] >= -2)", "k_len"),
        ("ids[b, k] > steps[q]", "first(ids[b, :] >= min(steps[q_lo:q_hi]) + 1)", "k_len"),
        # Not along one dimension, or not by the key itself.
        ("ids[b, k // 2] >= w", "0", "k_len"),
        ("steps[k - q + 24] >= w", "0", "k_len"),
    ],
)
def test_elements_in_an_order_bound_a_loop(read: Parse, source: str, begin: str, end: str) -> None:
    rule = tile_rule(read(source))
    assert (text(rule.key_begin), text(rule.key_end)) == (begin, end)
    assert not rule.keys_exact
