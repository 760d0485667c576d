"""What a developer's run takes of a parametrized test, and what DRAWN_CASES=ci takes."""

from __future__ import annotations

import pytest

from tests import drawn


@pytest.mark.parametrize("is_sample", [False, True])
def test_a_sample_stands_for_all_values(monkeypatch: pytest.MonkeyPatch, is_sample: bool) -> None:
    monkeypatch.setattr(drawn, "IS_SAMPLE", is_sample)
    assert drawn.some("abc", "b") == (["b"] if is_sample else ["a", "b", "c"])
    with pytest.raises(AssertionError):
        drawn.some("abc", "d")


@pytest.mark.parametrize("sizes", [(3, 2), (2, 5), (4, 4), (6, 1)])
def test_a_diagonal_has_each_value_of_each_axis(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]) -> None:
    axes = [range(size) for size in sizes]
    monkeypatch.setattr(drawn, "IS_SAMPLE", True)
    pairs = drawn.diagonal(*axes)
    assert [sorted({pair[at] for pair in pairs}) for at in (0, 1)] == [list(axis) for axis in axes]
    assert len(pairs) == max(sizes)
    monkeypatch.setattr(drawn, "IS_SAMPLE", False)
    assert len(drawn.diagonal(*axes)) == sizes[0] * sizes[1]
