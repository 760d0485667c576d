"""What a developer's run takes of a parametrized test, what DRAWN_CASES=ci takes, and what a turn takes of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests import drawn
from tests.conftest import is_out_of_turn


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


@dataclass(frozen=True)
class Named:
    """What the selection by turns asks of a test."""

    nodeid: str
    turns: int | None = 4

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.mark.in_turns(self.turns).mark if name == "in_turns" and self.turns else None


def of_turn(monkeypatch: pytest.MonkeyPatch, turn: int | None, tests: Sequence[Named]) -> list[Named]:
    if turn is None:
        monkeypatch.delenv("DRAWN_TURN", raising=False)
    else:
        monkeypatch.setenv("DRAWN_TURN", str(turn))
    return [test for test in tests if not is_out_of_turn(test)]  # type: ignore[arg-type]


def test_turns_share_the_tests_and_together_take_each(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [Named(f"tests/test_a.py::test_b[{number}-full]") for number in range(200)]
    parts = [of_turn(monkeypatch, turn, tests) for turn in range(20418, 20422)]
    assert sorted((test for part in parts for test in part), key=tests.index) == tests
    assert all(30 < len(part) < 70 for part in parts)
    assert of_turn(monkeypatch, 20422, tests) == parts[0]
    assert of_turn(monkeypatch, None, tests) == tests


def test_tests_with_the_same_parameters_have_the_same_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [[Named(f"tests/test_a.py::test_{name}[{number}]") for name in "bc"] for number in range(40)]
    taken = [of_turn(monkeypatch, 1, pair) for pair in pairs]
    assert all(one in ([], pair) for one, pair in zip(taken, pairs, strict=True))
    assert taken.count([]) < len(pairs)


def test_each_turn_takes_a_test_without_parameters_or_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [Named("tests/test_a.py::test_b"), *(Named(f"tests/test_a.py::test_b[{n}]", turns=None) for n in range(9))]
    assert of_turn(monkeypatch, 3, tests) == tests
