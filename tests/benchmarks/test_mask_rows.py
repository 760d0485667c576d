"""What the benchmark of masks writes down: kept, merged and shown without torch and without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mask_rows

    return mask_rows


def row(rows: Any, name: str, length: int, forward: float, backward: float | None = 2.0) -> Any:
    times = {"forward": {"flex": 1.0, "flashgen": 1.0 / forward}}
    if backward is not None:
        times["backward"] = {"flex": 1.0, "flashgen": 1.0 / backward}
    return rows.Row(rows.Cell(name, 64, length, 1, 4), times)


def test_what_is_saved_is_what_is_loaded(rows: Any, tmp_path: Path) -> None:
    results = rows.Results("a GPU", [row(rows, "bias", 4096, 1.5)], [rows.First("ALiBi", 64, {"flex": 9.0})])
    results.rows[0].notes["backward"] = "the two disagree"
    results.save(tmp_path / "results.json")
    assert rows.load(tmp_path / "results.json") == results
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_later_figures_replace_earlier_ones_of_the_same_cell(rows: Any) -> None:
    first = rows.Results("a GPU", [row(rows, "bias", 4096, 3.0), row(rows, "causal", 4096, 2.0)])
    second = rows.Results("a GPU", [row(rows, "bias", 4096, 4.0)], [rows.First("ALiBi", 64, {"flex": 9.0})])
    whole = rows.merged([first, second])
    assert [(r.cell.name, r.ratio("forward")) for r in whole.rows] == [("causal", 2.0), ("bias", 4.0)]
    assert whole.first == second.first
    with pytest.raises(SystemExit, match=r"one run is of a GPU, another of no GPU"):
        rows.merged([first, rows.Results("no GPU")])


def test_the_table_has_every_row_in_order_and_says_what_is_wanting(rows: Any) -> None:
    halves = row(rows, "softcap", 16384, 0.5, None)
    halves.notes["backward"] = "the GPU's memory does not hold it"
    results = rows.Results("a GPU", [halves, row(rows, "ALiBi", 16384, 8.0), row(rows, "bias", 4096, 2.0)])
    text = rows.table(results)
    lines = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert lines == ["| mask or score", "| ---", "| bias", "| ALiBi", "| softcap"]
    assert "| softcap | 64 | 16384 | 1.000 | 2.000 | 0.50 | - | - | - |" in text
    assert "forward: 2.000 (wanted: 1.5); 1 of 3 cells are slower; lowest: 0.50 (softcap, D=64, S=16384)" in text
    assert "backward: 2.000 (wanted: 1.5); 0 of 2 cells" in text
    assert "- softcap, D=64, S=16384, backward: the GPU's memory does not hold it" in text


def test_results_are_shown_without_torch(rows: Any, tmp_path: Path) -> None:
    for name in ("causal", "bias"):
        rows.Results(
            "a GPU", [row(rows, name, 4096, 2.0)], [rows.First(name, 64, {"flex": 9.0, "flashgen": 1.0})]
        ).save(tmp_path / name)
    # With "torch" blocked, importing it fails as it does where it is not installed.
    code = f"import sys, runpy; sys.modules['torch'] = None; sys.path.insert(0, {str(BENCHMARKS)!r}); "
    code += f"sys.argv = ['masks.py', '--show', *{[str(tmp_path / n) for n in ('causal', 'bias')]!r}]; "
    code += f"runpy.run_path({str(BENCHMARKS / 'masks.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| causal | 64 | 4096 |" in done.stdout
    assert "| bias | 64 | 9.00 | 1.00 |" in done.stdout
