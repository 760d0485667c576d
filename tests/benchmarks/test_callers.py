"""What the benchmark of trainers' and engines' calls compares, on the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import callers

    monkeypatch.setattr(callers, "DEVICE", "cpu")
    return callers


def problem_of(callers: Any, page: int = 8, kind: str = "paged") -> Any:
    return callers.Problem(kind, "forward", 64, 64, 4, 2, (5, 5), (12, 20), page=page)


def test_prompts_in_pages_attend_alike_with_and_without_batch_invariant(
    callers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(callers)
    given = callers.Given.of(problem)
    called: list[Any] = []
    attend = fg.flash_attn_with_kvcache

    def recorded(*arguments: Any, **options: Any) -> Any:
        called.append(options["batch_invariant"])
        return attend(*arguments, **options)

    monkeypatch.setattr(fg, "flash_attn_with_kvcache", recorded)
    with fg.torch.emulate_cpu():
        runs = [callers.prepared(problem, given, name) for name in (callers.OURS, callers.INVARIANT)]
        usual, invariant = (run()[0] for run in runs)
    torch.testing.assert_close(usual, invariant, rtol=2e-2, atol=2e-2)
    assert called == [False, True]


def test_only_calls_with_a_cache_take_batch_invariant(callers: Any) -> None:
    problem = problem_of(callers, page=0, kind="packed")
    given = callers.Given.of(problem)
    with pytest.raises(callers.CannotError, match="with a cache"):
        callers.prepared(problem, given, callers.INVARIANT)()


def test_batch_invariant_is_no_peer(callers: Any) -> None:
    row = callers.Row(problem_of(callers), {callers.OURS: 30.0, callers.INVARIANT: 90.0})
    assert row.ratio is None
    row.tflops["fa3"] = 60.0
    assert row.ratio == 0.5
