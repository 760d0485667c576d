"""Offsets of packed rows on the host are looked at before every call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import ArgumentError
from tests.launch.on_host import executor


def int32(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


GOOD = int32(2, 5, 5, 9)
BAD = {
    "falls": (int32(0, 6, 4, 9), r"{name}\[2\]=4 is below {name}\[1\]=6; .*running sum"),
    "passes the end": (int32(0, 5, 9, 11), r"{name}\[3\]=11 passes the end of {tensor}, which has 10 rows; "),
    "starts below 0": (int32(-1, 5, 5, 9), r"{name}\[0\]=-1 is negative; "),
    "longer than the longest": (int32(0, 4, 4, 9), r"sequence 2 of {name} has 5 rows, more than max_seqlen_{side}=4; "),
}


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("case", BAD)
def test_offsets_that_are_none_are_refused(case: str, side: str, is_remembered: bool) -> None:
    bad, words = BAD[case]
    run = executor(varlen=True)
    x, lse = np.ones((10, 2, 16), np.float32), np.ones((2, 10), np.float32)
    longest = {"q": 11, "k": 11} | ({side: 4} if "longer" in case else {})
    wrong = {"q": GOOD, "k": GOOD} | {side: bad}

    def sequences(starts: dict[str, Any]) -> fg.Sequences:
        return fg.Sequences(starts["q"], starts["k"], longest["q"], longest["k"])

    if is_remembered:
        run.forward(x, x, x, sequences=sequences({"q": GOOD, "k": GOOD}))
        run.backward(x, x, x, x, x, lse, sequences=sequences({"q": GOOD, "k": GOOD}))
    pattern = words.format(name=f"sequences.cu_seqlens_{side}", tensor=side, side=side)
    with pytest.raises(ArgumentError, match=pattern):
        run.forward(x, x, x, sequences=sequences(wrong))
    with pytest.raises(ArgumentError, match=pattern):
        run.backward(x, x, x, x, x, lse, sequences=sequences(wrong))


@pytest.mark.parametrize("case", BAD)
def test_offsets_of_queries_beside_a_cache_are_checked_too(case: str) -> None:
    bad, words = BAD[case]
    run = executor(cache="contiguous", direction="forward")
    q, k = np.ones((10, 2, 16), np.float32), np.ones((3, 8, 2, 16), np.float32)
    longest = 4 if "longer" in case else 11
    with pytest.raises(ArgumentError, match=words.format(name=r"cache.cu_seqlens_q", tensor="q", side="q")):
        run.forward(q, k, k, cache=fg.KVCache(int32(8, 8, 8), cu_seqlens_q=bad, max_seqlen_q=longest))


def test_a_million_offsets_make_a_short_complaint() -> None:
    starts = np.zeros(1_000_001, np.int32)
    starts[500_000] = 1
    x = np.ones((10, 2, 16), np.float32)
    with pytest.raises(ArgumentError) as error:
        executor(varlen=True).forward(x, x, x, sequences=fg.Sequences(starts, starts, 5, 5))
    assert len(str(error.value)) < 400


def test_lists_are_no_arrays() -> None:
    x = np.ones((10, 2, 16), np.float32)
    with pytest.raises(ArgumentError, match=r"cu_seqlens_q: .*list is not an array"):
        executor(varlen=True).forward(x, x, x, sequences=fg.Sequences([0, 10], int32(0, 10), 10, 10))
