"""The errors of docs/explanation/fp8.md are what the benchmark computes, and rotation keeps them small."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.drawn import some

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "fp8.md"
#: (keys, head dimension, size of outliers): the largest error with rotation and blocks of 128 rows.
MOST = {
    (4096, 128, 0): 1.40e-3,
    (4096, 64, 10): 1.45e-2,
    (4096, 128, 10): 8.6e-3,
    (4096, 256, 10): 7.1e-3,
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fp8_error

    return fp8_error


def row_of(first: str) -> list[float]:
    """The numbers of the page's row that begins so."""
    (line,) = re.findall(rf"^\| {first} \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [float(cell) for cell in line.split("|")]


def test_the_page_shows_what_the_benchmark_computes(benchmark: Any) -> None:
    heads = benchmark.Heads(1024, 128, 10)
    blocks = benchmark.SCALES.values()
    found = [heads.size_of_o, *(heads.error(block, rotate) for rotate in (False, True) for block in blocks)]
    assert row_of("1024") == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("problem", some(MOST, (4096, 128, 0)))
def test_errors_of_rotated_blocks_are_within_their_bounds(benchmark: Any, problem: tuple[int, int, float]) -> None:
    assert benchmark.Heads(*problem).error(128, True) <= MOST[problem]
