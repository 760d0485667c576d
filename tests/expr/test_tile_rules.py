"""What the rule of a mask says: which tiles loops go over, what they read for it, and how it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashgen.expr.readings.numpy import evaluate, evaluate_all
from flashgen.expr.readings.tiles import TileRule, tile_rule
from flashgen.expr.tree.nodes import Const, Node
from flashgen.expr.tree.text import text
from flashgen.expr.tree.tile_nodes import Range, Wide
from flashgen.expr.tree.visit import postorder

Parse = Callable[[str], Node]


def interval(rule: TileRule, env: dict[str, int]) -> tuple[int, int, int, int]:
    ends = (rule.key_begin, rule.key_end, rule.query_begin, rule.query_end)
    return tuple(int(x) for x in evaluate_all(list(ends), env))  # type: ignore[return-value]


def test_a_window_visits_only_its_tiles_among_a_million_keys(read: Parse) -> None:
    env = {"q_lo": 500_000, "q_hi": 500_127, "k_lo": 500_000, "k_hi": 500_063, "q_len": 2**20, "k_len": 2**20}
    rule = tile_rule(read("(q >= k) & (q - k < 1024)"))
    assert interval(rule, env) == (500_000 - 1023, 500_128, 500_000, 500_063 + 1024)


def test_a_chunk_is_found_without_looking_at_the_other_keys(read: Parse) -> None:
    env = {
        "q_lo": 500_000,
        "q_hi": 500_127,
        "k_lo": 500_000,
        "k_hi": 500_063,
        "q_len": 2**20,
        "k_len": 2**20,
        "n": 8192,
    }
    first = 500_000 // 8192 * 8192
    for source in ("(q // 8192 == k // 8192) & (q >= k)", "(q // n == k // n) & (q >= k)"):
        assert interval(tile_rule(read(source)), env) == (first, 500_128, 500_000, first + 8192)


@pytest.mark.parametrize(
    ("mask", "lower", "upper"),
    [
        ("q >= k", None, 0),
        ("k - q <= k_len - q_len", None, 4),
        ("(q >= k) & (q - k < 6)", -5, 0),
        ("(q >= k) & (q - k < w)", -8, 0),
        ("abs(q - k) <= w", -9, 9),
        ("2 * q >= 2 * k + 3", None, -2),
        ("q - k == 3", -3, -3),
        ("~(q < k) & (q >= k + 2)", None, -2),
        ("minimum(q, q + 1) >= k", None, 0),
        ("q >= q", None, None),
    ],
)
def test_bands_are_recognised(read: Parse, mask: str, lower: int | None, upper: int | None) -> None:
    band = tile_rule(read(mask)).band
    assert band is not None
    env = {"w": 9, "q_len": 6, "k_len": 10}
    found = [None if end is None else int(evaluate(end, env)) for end in (band.lower, band.upper)]
    assert found == [lower, upper]


@pytest.mark.parametrize(
    "mask", ["(q >= k) | (k < 3)", "q + k < 9", "q >= k + lengths[b]", "q >= k + h", "(q >= k) & on", "q != k", "q < 5"]
)
def test_what_is_not_one_band_is_not_called_one(read: Parse, mask: str) -> None:
    assert tile_rule(read(mask)).band is None


def test_rules_read_well(read: Parse) -> None:
    rule = tile_rule(read("(q >= k) & (q - k < 64)"))
    assert text(rule.may) == "(k_lo <= q_hi) & (q_lo <= k_hi + 63)"
    assert text(rule.key_begin) == "maximum(0, q_lo - 63)"
    assert text(rule.key_end) == "minimum(k_len, q_hi + 1)"
    assert text(tile_rule(read("(k < n) | (q >= k)")).full) == "(n > k_hi) | (q_lo >= k_hi)"


def ranges(node: Node) -> list[Range]:
    return [n for n in postorder(node) if isinstance(n, Range)]


def test_document_ids_are_answered_by_tables_over_whole_tiles(read: Parse) -> None:
    rule = tile_rule(read("(ids[b, q] == ids[b, k]) & (q >= k)"))
    assert {(r.kind, r.whole) for r in ranges(rule.may)} == {("min", "q"), ("max", "q"), ("min", "k"), ("max", "k")}


def test_loops_read_no_tensor_over_a_whole_sequence(read: Parse) -> None:
    rule = tile_rule(read("(ids[b, q] == ids[b, k]) & (steps[q] <= k) & seen[k]"))
    assert {r.whole for end in (rule.key_begin, rule.key_end) for r in ranges(end)} <= {"q"}
    assert {r.whole for end in (rule.query_begin, rule.query_end) for r in ranges(end)} <= {"k"}


def test_a_tensor_of_pairs_is_not_read_to_classify_a_tile(read: Parse) -> None:
    rule = tile_rule(read("pattern[h, q, k]"))
    assert rule.may is Const(True)
    assert rule.full is Const(False)


def test_only_sums_that_may_leave_32_bits_are_wide(read: Parse) -> None:
    plain = tile_rule(read("(k - q <= k_len - q_len) & (q - k < 1000)"))
    assert not any(isinstance(n, Wide) for n in postorder(plain.may, plain.full, plain.key_begin, plain.query_end))
    captured = tile_rule(read("q - k < w"))
    assert any(isinstance(n, Wide) for n in postorder(captured.key_begin))


@pytest.mark.parametrize("n", [0, -3])
def test_a_divisor_that_is_not_positive_means_that_every_tile_is_visited(read: Parse, n: int) -> None:
    rule = tile_rule(read("(q // n == k // n) & (q >= k)"))
    env = {"q_lo": 4, "q_hi": 7, "k_lo": 20, "k_hi": 23, "q_len": 32, "k_len": 32, "n": n}
    assert interval(rule, env) == (0, 32, 0, 32)
    assert evaluate(rule.may, env)
    assert not evaluate(rule.full, env)


def test_masks_that_allow_everything_or_nothing() -> None:
    everything, nothing = tile_rule(Const(True)), tile_rule(Const(False))
    env = {"q_lo": 0, "q_hi": 3, "k_lo": 0, "k_hi": 3, "q_len": 9, "k_len": 7}
    assert (everything.may, everything.full) == (Const(True), Const(True))
    assert interval(everything, env) == (0, 7, 0, 9)
    assert everything.band is not None
    assert (nothing.may, nothing.full) == (Const(False), Const(False))
    assert interval(nothing, env)[0] >= interval(nothing, env)[1]
