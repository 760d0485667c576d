"""What cannot be traced: each error shows the user's line and the remedy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.errors import SpecError, TraceError
from flashgen.expr.trace.traced import Traced
from flashgen.expr.trace.tracer import trace_mask, trace_score
from flashgen.expr.tree import functions as fg

IDS = np.zeros((2, 8), np.int64)
SLOPES = np.ones(4, np.float32)
TOO_LONG = 2**40
BACKWARDS = -2
count = 4
Mask = Callable[..., Any]
MASKS: list[tuple[Mask, str]] = [
    (
        lambda b, h, q, k: q >= k and k < 3,
        "`and` cannot combine traced values; write `&`, with each side in parentheses",
    ),
    (lambda b, h, q, k: q >= k or k < 3, "`or` cannot combine traced values; write `|`"),
    (lambda b, h, q, k: not q >= k, "`not` cannot negate a traced value; write `~`"),
    (lambda b, h, q, k: True if q >= k else k < 3, "`if` cannot decide by a traced value"),
    (lambda b, h, q, k: 0 <= q < k, r"write (a < b) & (b < c) for a < b < c"),
    (lambda b, h, q, k: q in (1, 2), "write (x == 1) | (x == 2)"),
    (lambda b, h, q, k: min(q, k) > 2, "min() cannot take a traced value; write fg.minimum instead"),
    (lambda b, h, q, k: any(q == i for i in range(3)), "any() cannot take a traced value; write | instead"),
    (lambda b, h, q, k: np.maximum(q, k) > 2, "np.maximum() cannot take a traced value; write fg.maximum instead"),
    (lambda b, h, q, k: np.logical_and(q > k, k > 2), "np.logical_and() cannot take a traced value; write & instead"),
    (lambda b, h, q, k: sum(q > i for i in range(count)) > 1, "how often code runs must be known when it is traced"),
    (lambda b, h, q, k: q >= k & q - k < 3, "put each comparison in parentheses: (q >= k) & (q - k < n)"),
    (lambda b, h, q, k: [1, 2][q] > 0, "bind the array to a variable of its own"),
    (lambda b, h, q, k: IDS[b] == 0, "IDS[b] is a tensor of 1 dimensions and has to be indexed: IDS[b][k]"),
    (lambda b, h, q, k: IDS[b, :] == 0, "IDS takes one number per dimension and no slices"),
    (
        lambda b, h, q, k: IDS[b, q / 2] == 0,
        "index 1 of IDS is a float; an index must be a whole number, so use //, not /",
    ),
    (lambda b, h, q, k: IDS[b, -1] == 0, "index 1 of IDS is -1; indices count from 0"),
    (lambda b, h, q, k: IDS == 0, "IDS is a tensor of 2 dimensions and has to be indexed: IDS[q, k]"),
    (lambda b, h, q, k: IDS.sum() == 0, "IDS.sum is not in the language; a captured tensor can only be indexed"),
    (lambda b, h, q, k: q < TOO_LONG, "1099511627776 does not fit the 32-bit integers of the language"),
    (lambda b, h, q, k: q < "three", "'three' (str) has no meaning here"),
    (lambda b, h, q, k: missing(q), "failed while it was traced (NameError: name 'missing' is not defined)"),  # type: ignore[name-defined]  # noqa: F821
    (lambda b, h, q, k: q @ k > 2, "failed while it was traced (TypeError: unsupported operand"),
    (lambda b, h, q, k: q << BACKWARDS > 2, "shifts by -2, and a shift count is not negative; capture another number"),
    (lambda b, h, q, k: IDS[b][q][k] == 0, "IDS has 2 dimensions and got 3 indices"),
    (lambda b, h, q, k: IDS[b][:] == 0, "IDS takes one number per dimension and no slices"),
    (lambda b, h, q, k: IDS[b][q / 2] == 0, "index 1 of IDS is a float"),
    (
        lambda b, h, q, k: IDS[q // 2] > k,
        "IDS[q // 2] is a tensor of 1 dimensions and has to be indexed",
    ),
    (lambda b, h, q, k: IDS[b].abs() > k, "IDS[b] is a tensor of 1 dimensions and has to be indexed: IDS[b][k]"),
    (lambda b, h, q, k: (q - k).clamp() > 0, "clamp() without limits does nothing"),
    (lambda b, h, q, k: (q / 2).int() > 0, "a float does not become a whole number"),
    (lambda b, h, q, k: q - k, "the mask function returned a number, <q - k>; return a condition, such as q >= k"),
    (lambda b, h, q, k: None, "the mask function returned None; does it lack a return?"),
    (lambda b, h, q, k: "causal", "the mask function returned a str, not a traced value"),
    (lambda q, k: q >= k, "is called with (b, h, q, k), but too many positional arguments"),
]
SCORES: list[tuple[Mask, str]] = [
    (lambda s, b, h, q, k: math.exp(s), "math.exp() cannot take a traced value; write fg.exp instead"),
    (lambda s, b, h, q, k: np.tanh(s), "np.tanh() cannot take a traced value; write fg.tanh instead"),
    (lambda s, b, h, q, k: np.where(q > k, s, 0), "np.where() cannot take a traced value; write fg.where instead"),
    (lambda s, b, h, q, k: math.floor(s), "math.floor() cannot take a traced value; write // instead"),
    (lambda s, b, h, q, k: math.erf(s), "math.erf() cannot take a traced value; use arithmetic, fg.where"),
    (lambda s, b, h, q, k: float(s), "a traced value is not a number yet"),
    (lambda s, b, h, q, k: s**1.5, "write fg.exp(y * fg.log(x)) for other powers"),
    (lambda s, b, h, q, k: SLOPES, "SLOPES is a tensor of 1 dimensions and has to be indexed: SLOPES[k]"),
    (lambda s, b, h, q, k: s + SLOPES, "SLOPES is a tensor of 1 dimensions and has to be indexed: SLOPES[k]"),
    (lambda s, b, h, q, k: SLOPES[s], "index 0 of SLOPES is a float"),
    (lambda s, b, h, q, k: q < k, "the score function returned a condition, <q < k>; return a number"),
    (lambda b, h, q, k: q, "is called with (s, b, h, q, k), but too many positional arguments"),
]


def assert_shown(trace: Callable[[Mask], Traced], function: Mask, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(function)
    shown = str(caught.value)
    assert message in shown
    line = inspect.getsourcelines(function)[1]
    assert shown.startswith(f"{Path(__file__).name}:{line}: "), shown
    assert inspect.getsource(function).splitlines()[0].strip() in shown
    assert isinstance(caught.value, SpecError)


@pytest.mark.parametrize(("function", "message"), MASKS, ids=[message[:40] for _, message in MASKS])
def test_errors_in_masks_show_the_line_and_the_remedy(function: Mask, message: str) -> None:
    assert_shown(trace_mask, function, message)


@pytest.mark.parametrize(("function", "message"), SCORES, ids=[message[:40] for _, message in SCORES])
def test_errors_in_scores_show_the_line_and_the_remedy(function: Mask, message: str) -> None:
    assert_shown(trace_score, function, message)


def branching(b: Any, h: Any, q: Any, k: Any) -> Any:
    allowed = q >= k
    if allowed:
        return allowed
    return k < 3


def looping(b: Any, h: Any, q: Any, k: Any) -> Any:
    while q > k:
        q = q - 1
    return q == k


@pytest.mark.parametrize(
    ("function", "word", "line"), [(branching, "if", "if allowed:"), (looping, "while", "while q > k:")]
)
def test_statements_that_branch_are_shown(function: Mask, word: str, line: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace_mask(function)
    message, shown = str(caught.value).splitlines()[:2]
    assert f"`{word}` cannot decide by a traced value" in message
    assert shown == f"    {line}"


def test_the_place_is_marked_under_the_line() -> None:
    with pytest.raises(TraceError) as caught:
        trace_score(lambda s, b, h, q, k: s + SLOPES[q / 2])
    _, line, marks = str(caught.value).splitlines()
    assert line[marks.index("^") : len(marks)] == "SLOPES[q / 2]"


def test_an_error_in_a_helper_shows_the_helpers_line() -> None:
    def helper(q: Any) -> Any:
        return math.log(q)

    with pytest.raises(TraceError, match=r"return math.log\(q\)"):
        trace_score(lambda s, b, h, q, k: helper(q))


def test_trees_that_are_too_large_are_refused() -> None:
    def long(b: Any, h: Any, q: Any, k: Any) -> Any:
        parts = [q * i + k == 3 for i in range(2, 140)]
        while len(parts) > 1:
            parts = [x | y for x, y in zip(parts[::2], parts[1::2], strict=False)]
        return parts[0]

    def deep(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(40):
            s = fg.exp(s)
        return s

    with pytest.raises(TraceError, match=r"the mask has \d+ operations and values; at most 256 are allowed"):
        trace_mask(long)
    with pytest.raises(TraceError, match="the score is nested 41 deep; at most 32 are allowed"):
        trace_score(deep)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TraceError, match="mask='causal' is not a function; write lambda b, h, q, k"):
        trace_mask("causal")  # type: ignore[arg-type]


def test_tensors_of_other_types_are_refused_when_used() -> None:
    table = np.zeros(3, complex)
    with pytest.raises(TraceError, match="table has elements of type complex128; captured tensors are bool, uint8"):
        trace_score(lambda s, b, h, q, k: s + table[h])


def test_code_without_a_file_still_gives_its_message() -> None:
    mask = eval("lambda b, h, q, k: q and k")
    with pytest.raises(TraceError, match="<string>:1: a traced value is not true or false yet"):
        trace_mask(mask)
