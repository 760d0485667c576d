"""What the benchmark of attention counts and shows, without torch and without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention_rows

    return attention_rows


def test_operations_are_counted_as_the_papers_count_them(rows: Any) -> None:
    full = rows.Problem("forward", 128, 1024, 4096, 2, 16, 4)
    assert full.flops == 4 * 1024 * 4096 * 128 * 16 * 2
    square = replace(full, keys=1024)
    assert replace(square, causal=True).flops == square.flops / 2
    assert replace(full, causal=True).pairs == 1024 * 4096 - 1024 * 1024 / 2
    assert replace(full, direction="backward").flops == full.flops * 2.5


@pytest.mark.parametrize(("length", "window"), [(7, 3), (300, 64), (5, 5)])
def test_a_windows_pairs_are_those_of_the_mask_but_half_of_its_diagonal(rows: Any, length: int, window: int) -> None:
    seen = sum(0 <= q - k < window for q in range(length) for k in range(length))
    problem = rows.Problem("forward", 64, length, length, 1, 1, 1, True, window)
    # As for a causal mask, by the convention, what is on the diagonal of the triangle counts half.
    assert problem.pairs == seen - window / 2


def test_the_grid_has_every_cell_once_with_the_same_number_of_tokens(rows: Any) -> None:
    cells = list(rows.grid(["forward", "backward"], [64, 128], [512, 16384], 16384, 2048, "fp16"))
    assert len(set(cells)) == len(cells) == 16
    assert {cell.batch * cell.queries for cell in cells} == {16384}
    assert {cell.heads * cell.head_dim for cell in cells} == {2048}
    assert {cell.dtype for cell in cells} == {"fp16"}


def test_other_problems_have_what_the_grid_has_not(rows: Any) -> None:
    cells = list(rows.others(["forward"], [128], 16384, 2048, "bf16"))
    assert len(set(cells)) == len(cells)
    assert any(cell.heads == 64 and cell.kv_heads == 8 for cell in cells)
    assert any((cell.queries, cell.keys) == (1024, 16384) for cell in cells)
    assert any(cell.queries == 16385 for cell in cells)
    assert any(cell.window == 1024 and cell.causal for cell in cells)
    assert any(cell.softcap for cell in cells)


def test_the_table_compares_with_the_best_peer_of_each_cell_and_names_who_is_behind(rows: Any) -> None:
    one, two, three = (rows.Problem("forward", 64, length, length, 1, 2, 2) for length in (512, 1024, 2048))
    measured = [
        rows.Row(one, {"fa2": 100.0, "fa4": 200.0, "flashgen": 400.0}),
        rows.Row(two, {"fa2": 100.0, "flashgen": 50.0}, {"fa4": "it has no such thing"}),
        rows.Row(three, {"flashgen": 70.0}),
    ]
    text = rows.table(measured, ["fa2", "fa4"])
    assert "| forward | 64 | full | 512 | 100 | 200 | 400 | 2.00 |" in text
    assert "| forward | 64 | full | 1024 | 100 | - | 50 | 0.50 |" in text
    assert "| forward | 64 | full | 2048 | - | - | 70 | - |" in text
    assert "best peer of each cell 1.000 (D=64 1.000); over fa2 1.41, fa4 2.00." in text
    assert "1 of 2 cells are behind: forward, D=64, full, S=1024 (0.500)." in text
    assert "- forward, D=64, full, S=1024, fa4: it has no such thing" in text


def test_what_is_saved_is_what_is_loaded(rows: Any, tmp_path: Path) -> None:
    problem = rows.Problem("backward", 64, 512, 2048, 1, 8, 2, True, 1024, 30.0, "fp16")
    measured = [rows.Row(problem, {"flashgen": 1.5}, {"fa2": "why"})]
    rows.save("a GPU", measured, tmp_path / "figures.json")
    assert rows.load(tmp_path / "figures.json") == ("a GPU", measured)
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_a_product_of_matrices_has_a_column_and_is_no_peer(rows: Any) -> None:
    one, two = (rows.Problem("forward", 64, length, length, 1, 2, 2) for length in (512, 1024))
    measured = [
        rows.Row(one, {"fa4": 200.0, "product": 600.0, "flashgen": 300.0}),
        rows.Row(two, {"fa4": 100.0, "product": 80.0, "flashgen": 120.0}),
    ]
    assert [row.ratio for row in measured] == [1.5, 1.2]
    text = rows.table(measured, ["fa4"])
    assert "| forward | 64 | full | 1024 | 100 | 80 | 120 | 1.20 |" in text
    assert "0 of 2 cells are behind." in text
