"""``& | ^ << >>`` and ``~`` of whole numbers: Python's results in every reading, as far as they fit 32 bits."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashgen.errors import ArgumentError
from flashgen.expr.analysis.bitwise_intervals import bits_interval
from flashgen.expr.readings.numpy import evaluate
from flashgen.expr.readings.tiles import tile_rule
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.build import MAX_INT, MIN_INT, binary
from flashgen.expr.tree.nodes import Const, Index, Scalar
from flashgen.expr.tree.text import text

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
}
NUMBERS = [MIN_INT, MIN_INT + 1, -1000, -64, -5, -1, 0, 1, 2, 5, 63, 64, 1000, MAX_INT - 1, MAX_INT]
COUNTS = [0, 1, 5, 30, 31, 32, 33, 63, 64, 1000, MAX_INT]
X, Y = Scalar("x", "int"), Scalar("y", "int")


def pairs(op: str) -> list[tuple[int, int]]:
    """Operands whose result fits 32 bits."""
    seconds = COUNTS if op in ("<<", ">>") else NUMBERS
    small = [(a, b) for a in NUMBERS for b in seconds if op != "<<" or a == 0 or b < 64]
    return [(a, b) for a, b in small if MIN_INT <= OPERATORS[op](a, min(b, 64) if op == "<<" else b) <= MAX_INT]


@pytest.mark.parametrize("op", OPERATORS)
def test_results_that_fit_are_pythons_in_numpy_constants_and_cuda(column: Any, op: str) -> None:
    cases = pairs(op)
    assert len(cases) > 40
    exact = [OPERATORS[op](a, b) if op != "<<" or a else 0 for a, b in cases]
    a, b = (np.array(side) for side in zip(*cases, strict=True))
    np.testing.assert_array_equal(evaluate(binary(op, X, Y), {"x": a, "y": b}), exact)
    assert [evaluate(binary(op, X, y), {"x": x}) for x, y in cases if op != "<<" or y <= 30] == [
        e for e, (_, y) in zip(exact, cases, strict=True) if op != "<<" or y <= 30
    ]
    folded = [(binary(op, Const(x), Const(y)), e) for e, (x, y) in zip(exact, cases, strict=True) if y <= 30]
    assert all(node is Const(e) for node, e in folded)
    written = {"<<": "shift_left({}, {})", ">>": "shift_right({}, {})"}.get(op, f"{{}} {op} {{}}")
    out, x = np.zeros(len(cases), np.int32), np.stack([a, b]).astype(np.int32)
    column(f"params.out[i] = {written.format('params.x[i]', f'params.x[i + {len(cases)}]')};", x, out)
    np.testing.assert_array_equal(out, exact)


def test_complements_are_pythons() -> None:
    np.testing.assert_array_equal(evaluate(~X, {"x": np.array(NUMBERS)}), [~n for n in NUMBERS])


@pytest.mark.parametrize(
    ("source", "values", "message"),
    [
        ("1 << x", {"x": 31}, r"1 << x is 1 << 31, which does not fit the 32-bit integers of the language"),
        ("x << y", {"x": 3, "y": np.array([0, 29, 30])}, r"x << y is 3 << 30"),
        ("x << y", {"x": -2, "y": 1000}, r"is -2 << 1000"),
        ("x << y", {"x": 1, "y": np.array([3, -2])}, r"x << y shifts by -2, and a shift count is not negative"),
        ("x >> y", {"x": 1, "y": -1}, r"x >> y shifts by -1"),
    ],
)
def test_a_result_beyond_32_bits_and_a_negative_count_are_refused(source: str, values: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        evaluate(parse(source, {"x": X, "y": Y}), values)


def test_kernels_keep_the_low_bits_of_a_shift_and_take_a_negative_count_for_none(column: Any) -> None:
    x = np.int32([[3, -1, 1, 7, 7], [31, 40, -1, -5, 32]])
    out = np.zeros(5, np.int32)
    column("params.out[i] = shift_left(params.x[i], params.x[i + 5]);", x, out)
    assert out.tolist() == [-(2**31), 0, 1, 7, 0]
    column("params.out[i] = shift_right(params.x[i], params.x[i + 5]);", x, out)
    assert out.tolist() == [0, -1, 1, 7, 0]


@pytest.mark.parametrize("op", OPERATORS)
def test_intervals_hold_every_result(op: str) -> None:
    """Of all operands in random intervals, with ends that are written in the code, known at the call, or unknown."""
    rng = np.random.default_rng(len(op) + ord(op[0]))
    limited = 0
    for _ in range(400):
        spans, ends, values = [], [], {}
        for name in "ab":
            low = int(rng.integers(0 if op in ("<<", ">>") and name == "b" else -40, 40))
            high = low + int(rng.integers(0, 4 if op == "<<" and name == "b" else 30))
            spans.append((low, high))
            values |= {f"{name}_lo": low, f"{name}_hi": high}
            ends.append(
                tuple(
                    Const(x) if rng.random() < 0.5 else Scalar(n, "int")
                    for x, n in ((low, f"{name}_lo"), (high, f"{name}_hi"))
                )
            )
            if rng.random() < 0.1:
                ends[-1] = (None, ends[-1][1]) if rng.random() < 0.5 else (ends[-1][0], None)
        x, y = (np.arange(low, high + 1) for low, high in spans)
        found = (
            evaluate(binary(op, X, Y), {"x": x[:, None], "y": y[None, :]}) if op != "<<" or spans[1][1] < 24 else None
        )
        if found is None:
            continue
        low, high = bits_interval(op, *ends)
        assert low is None or evaluate(low, values) <= found.min()
        assert high is None or evaluate(high, values) >= found.max()
        limited += (low is not None) + (high is not None)
    assert limited > (150 if op != "<<" else 50)


@pytest.mark.parametrize(
    ("mask", "skipped"),
    [
        ("q >> 4 == k >> 4", True),
        ("(k & 15) == 3", True),
        ("(q ^ k) < 16", False),
        ("(k | 1) < 9", True),
        ("(k << 1) < q", True),
        ("k >> bits == q >> bits", True),
        ("k & (q & 7) > 100", False),
    ],
)
def test_tiles_are_skipped_where_an_interval_tells(mask: str, skipped: bool) -> None:
    rule = tile_rule(parse(mask.replace("k & (q & 7) > 100", "(k & (q & 7)) > 100"), {"bits": Scalar("bits", "int")}))
    low = np.arange(0, 64, 8)
    env = {"q_len": 64, "k_len": 64, "b": 0, "h": 0, "bits": 4}
    env |= {"q_lo": low[:, None], "q_hi": low[:, None] + 7, "k_lo": low[None, :], "k_hi": low[None, :] + 7}
    may = np.broadcast_to(evaluate(rule.may, env), (8, 8))
    assert (may.sum() < 64) == skipped or not may.any()


def test_a_mask_of_bits_reads_as_written() -> None:
    q, k, bits = Index("q"), Index("k"), Scalar("bits", "int")
    assert text((bits >> k % 32) & 1 == 1) == "(bits >> (k % 32)) % 2 == 1"
    assert text((q ^ k) & 6 == 0) == "((q ^ k) & 6) == 0"
