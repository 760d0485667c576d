"""What each side brings to a tree is found once for it, and the tree says the same as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.expr.analysis.hoisting import Split, is_light, split, with_keys_apart
from flashgen.expr.readings.numpy import evaluate, evaluate_all
from flashgen.expr.readings.tiles import tile_rule
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.nodes import Binary, Index, Load, Node
from flashgen.expr.tree.text import text
from flashgen.expr.tree.tile_nodes import Range, TileVar
from flashgen.expr.tree.visit import postorder

PAIR = {"query": [Index("q")], "key": [Index("k")]}
TILE = {"queries": [TileVar("q_lo"), TileVar("q_hi")], "keys": [TileVar("k_lo"), TileVar("k_hi")]}


def put_together(found: Split, env: dict[str, Any]) -> list[Any]:
    """The roots, from facts that were evaluated by themselves."""
    given = dict(env)
    for side, facts in found.facts.items():
        for name, node in facts.items():
            given[f"{side}.{name}"] = evaluate(node, env)
    return evaluate_all(list(found.roots.values()), given)


@pytest.mark.parametrize("seed", range(60))
def test_trees_say_the_same_in_parts(draw: Any, seed: int) -> None:
    random = draw(seed)
    mask = random.bool_(3)
    env = random.values(19, 22)
    env.update(b=1, h=2)
    pair = {**env, "q": np.arange(19)[:, None], "k": np.arange(22)[None, :]}
    found = split({"mask": mask}, PAIR)
    np.testing.assert_array_equal(put_together(found, pair)[0], evaluate(mask, pair))
    low, high = np.array([0, 4, 9, 18]), np.array([3, 8, 17, 18])
    tile = {**env, "q_lo": low[:, None], "q_hi": high[:, None], "k_lo": low[None, :], "k_hi": high[None, :]}
    rule = tile_rule(mask)
    parts = put_together(split({"may": rule.may, "full": rule.full}, TILE), tile)
    for part, whole in zip(parts, evaluate_all([rule.may, rule.full], tile), strict=True):
        np.testing.assert_array_equal(part, whole)


def test_what_is_left_for_a_pair_is_cheap(captured: dict[str, Any]) -> None:
    mask = parse("(q >= k) & (ids[b, q] == ids[b, k]) & (q // n == k // n) & ~seen[k]", captured)
    found = split({"mask": mask}, PAIR, taken=("q", "k", "seen"))
    shown = {side: {name: text(node) for name, node in facts.items()} for side, facts in found.facts.items()}
    assert shown == {
        "query": {"captured_ids": "ids[b, q]", "fact": "q // n"},
        "key": {"captured_ids": "ids[b, k]", "fact": "k // n", "fact2": "~seen[k]"},
    }
    costly = [x for x in postorder(found.roots["mask"]) if isinstance(x, Load) or getattr(x, "op", "") == "//"]
    assert not costly
    assert is_light(found.roots["mask"])


def test_sums_of_one_side_are_no_facts(captured: dict[str, Any]) -> None:
    found = split({"mask": parse("k - q <= w + q_len", captured)}, PAIR)
    assert found.facts == {"query": {}, "key": {}}


def test_much_for_every_pair_is_not_light(captured: dict[str, Any]) -> None:
    mask: Node = parse("q - k < w", captured)
    for step in range(12):
        mask = Binary("&", mask, parse(f"(q + k) % {step + 3} != 1", captured))
    assert not is_light(split({"mask": mask}, PAIR).roots["mask"])


def test_extremes_of_tiles_are_named_for_what_they_are(captured: dict[str, Any]) -> None:
    rule = tile_rule(parse("ids[b, q] == ids[b, k]", captured))
    found = split({"may": rule.may, "full": rule.full}, TILE)
    assert {side: set(facts) for side, facts in found.facts.items()} == {
        "queries": {"captured_ids_min", "captured_ids_max"},
        "keys": {"captured_ids_min", "captured_ids_max"},
    }
    assert all(isinstance(node, Range) for facts in found.facts.values() for node in facts.values())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("k - q <= k_len - q_len", "k <= q + k_len - q_len"),
        ("q >= k", "k <= q"),
        ("q - k < 5", "k >= q - 4"),
        ("q + 3 > k", "k <= q + 2"),
        # What could wrap around stays as it is.
        ("k - q <= w", "k - q <= w"),
        ("(ids[b, q] + q < k) & (k > 3)", "(ids[b, q] + q < k) & (k > 3)"),
    ],
)
def test_the_key_stands_alone_where_nothing_can_overflow(captured: dict[str, Any], source: str, expected: str) -> None:
    assert text(with_keys_apart(parse(source, captured))) == expected


@pytest.mark.parametrize("seed", range(40))
def test_masks_with_keys_apart_are_the_same(draw: Any, seed: int) -> None:
    random = draw(seed)
    mask = random.bool_(3)
    env = random.values(19, 22)
    env.update(b=1, h=2, q=np.arange(19)[:, None], k=np.arange(22)[None, :])
    np.testing.assert_array_equal(evaluate(with_keys_apart(mask), env), evaluate(mask, env))
