"""What the benchmark of decoding counts and shows, without torch and without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decode_rows

    return decode_rows


def test_every_key_and_value_counts_once_in_bytes_and_once_per_query_in_flops(rows: Any) -> None:
    problem = rows.Problem(2, 8, 2, 64, 1000, 16, new=3)
    assert problem.bytes(2) == 2 * 1000 * 2 * (64 + 64) * 2
    assert problem.flops() == 2 * 1000 * 8 * 3 * (64 + 64) * 2
    latent = replace(problem, heads_kv=1, latent=512)
    # The latent vector is read once, for keys and values.
    assert latent.bytes(2) == 2 * 1000 * (64 + 512) * 2
    assert latent.flops() == 2 * 1000 * 8 * 3 * (64 + 512 + 512) * 2


def test_ragged_lengths_are_between_the_shortest_and_the_longest(rows: Any) -> None:
    lengths = rows.Problem(5, 8, 2, 64, 1600, 16, shortest=100).lengths()
    assert lengths == [100, 200, 400, 800, 1600]


def test_labels_of_all_rows_differ(rows: Any) -> None:
    for table in (rows.ROWS, rows.LATENT_ROWS):
        assert len({str(problem) for problem in table}) == len(table)
    tree = rows.Problem(64, 32, 8, 128, 8192, 16, shortest=100, new=8, tree=True)
    assert str(tree) == "64, 32/8, 128, 8192, 16, from 100 keys, 8 tokens in a tree"


def test_rows_have_what_engines_call_besides_one_token_in_pages(rows: Any) -> None:
    assert {problem.page for problem in rows.ROWS} >= {1, 16, 64}
    assert {problem.new for problem in rows.ROWS} >= {1, 4, 8}
    assert any(problem.tree for problem in rows.ROWS)


def test_a_node_of_the_tree_sees_itself_and_the_nodes_above_it(rows: Any) -> None:
    seen = rows.ancestors(8)
    assert [set(row.nonzero()[0]) for row in seen] == [
        {0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}, {0, 2, 6}, {0, 1, 3, 7}
    ]  # fmt: skip


def test_each_kind_is_compared_with_the_better_peer_of_its_own(rows: Any) -> None:
    rates = {"paged": 30.0, "e4m3": 20.0, "fa3": 40.0, "cudnn": 60.0, "fa3-e4m3": 10.0}
    row = rows.Row(rows.Problem(1, 8, 2, 64, 100, 16), rates)
    assert (row.ratio("paged"), row.ratio("e4m3"), row.ratio("portable")) == (0.5, 2.0, None)
    del rates["fa3-e4m3"]
    assert row.ratio("e4m3") is None


def test_a_line_has_as_many_cells_as_the_head(rows: Any) -> None:
    kinds = ["paged", "contiguous", "e4m3", "fa3", "fa3-e4m3"]
    row = rows.Row(rows.Problem(1, 8, 2, 64, 100, 16), {"paged": 30.0, "fa3": 40.0})
    first, rule = rows.head(kinds).splitlines()
    assert first.count("|") == rule.count("|") == row.line(kinds).count("|")
    assert row.line(kinds) == "| 1, 8/2, 64, 100, 16 | 30 | - | - | 40 | - | 0.75 | - |"


def test_means_are_geometric_and_of_the_rows_with_peers(rows: Any) -> None:
    problem = rows.Problem(1, 8, 2, 64, 100, 16)
    found = [rows.Row(problem, {"paged": x, "fa3": 1.0}) for x in (0.5, 2.0)] + [rows.Row(problem, {"paged": 9.0})]
    assert list(rows.means(found, ["paged", "e4m3", "fa3"])) == [
        "paged: geometric mean over the better peer 1.000; lowest 0.50."
    ]
