"""What is timed is prepared by many processes, outlives the loss of some, and is timed one by one in its order."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = str(ROOT / "benchmarks")


class Contest:
    """Finds nothing and takes a millisecond for each token; what its cell is called says what goes wrong."""

    def __init__(self, cell: Any, libraries: Sequence[str]) -> None:
        self.cell, self.libraries = cell, libraries
        self.process = os.getpid()

    def prepare(self) -> str:
        sys.path.insert(0, BENCHMARKS)
        from mask_pool import LostContextError

        if "flex" in self.libraries and "loses its context" in self.cell.name:
            raise LostContextError("an illegal address")
        if "flex" in self.libraries and "ends its process" in self.cell.name:
            os._exit(3)
        if "fails" in self.cell.name:
            raise ValueError("too long")
        return "the two disagree" if "disagrees" in self.cell.name else ""

    def time(self) -> Any:
        from mask_rows import Row

        assert os.getpid() == self.process
        times = {name: float(self.cell.length) for name in self.libraries}
        return Row(self.cell, {"forward": times, "backward": times})


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    # Other processes find this module by its name.
    monkeypatch.syspath_prepend(str(ROOT))
    from mask_pool import Pool

    made = Pool(Contest, 2)
    yield made
    made.close()


def cells(*names: str) -> list[Any]:
    from mask_rows import Cell

    return [Cell(name, 64, 1 + number, 1, 1) for number, name in enumerate(names)]


def soon() -> float:
    return time.perf_counter() + 60


def test_all_that_can_be_timed_is_timed_in_its_order(pool: Any) -> None:
    names = ["one", "disagrees", "loses its context", "two", "ends its process", "three", "fails"]
    wanted = cells(*names)
    remarks = list(pool.prepare(wanted, soon()))
    rows = list(pool.rows(wanted, soon()))
    assert [row.cell.name for row in rows] == names
    both, alone = {"flex", "flashgen"}, {"flashgen"}
    assert [set(row.times.get("forward", ())) for row in rows] == [both, both, alone, both, alone, both, set()]
    assert [row.notes.get("backward") for row in rows] == [
        None,
        "the two disagree",
        "flex: an illegal address",
        None,
        "flex: the process ended",
        None,
        "flex: too long",
    ]
    assert [row.is_sound() for row in rows] == [True, False, True, True, True, True, False]
    assert sorted(remarks) == sorted(
        f"{wanted[number]}: {text}"
        for number, text in ((2, "an illegal address"), (4, "the process ended"), (6, "too long"), (6, "too long"))
    )


def test_nothing_is_begun_after_its_time(pool: Any) -> None:
    wanted = cells("one", "two", "three")
    assert list(pool.prepare(wanted[:2], soon())) == []
    remarks = list(pool.prepare(wanted[2:], time.perf_counter() - 1))
    assert remarks == ["the time is up; 1 cells are not prepared, first of them three, D=64, S=3"]
    assert [row.cell.name for row in pool.rows(wanted, soon())] == ["one", "two"]
    assert list(pool.rows(wanted, time.perf_counter() - 1)) == []
