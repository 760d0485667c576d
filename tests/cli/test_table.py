from __future__ import annotations

from flashgen.cli.output.table import columns


def test_cells_of_a_column_start_at_the_same_place() -> None:
    assert columns([("a", "bb", "c"), ("aaa", "b", "c")]) == ["a    bb  c", "aaa  b   c"]


def test_no_line_ends_in_blanks() -> None:
    assert columns([("a", "long"), ("b", "")], indent=2) == ["  a  long", "  b"]


def test_a_cell_of_several_lines_keeps_its_column() -> None:
    assert columns([("subject", "one\ntwo"), ("x", "y")]) == ["subject  one", "         two", "x        y"]


def test_rows_may_be_shorter_than_others() -> None:
    assert columns([("a",), ("b", "c")]) == ["a", "b  c"]


def test_no_rows_are_no_lines() -> None:
    assert columns([]) == []
