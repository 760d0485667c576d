from __future__ import annotations

import pytest

from flashgen.errors import ArgumentError
from flashgen.lab.text import bytes_text, html_table, parse_bytes, table


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (33_554_432, "33.6 MB"), (8.6e9, "8.6 GB")])
def test_bytes_are_written_in_powers_of_1000(count: int, text: str) -> None:
    assert bytes_text(int(count)) == text


@pytest.mark.parametrize(("text", "size"), [("192KiB", 196608), ("100 kb", 100_000), ("4096", 4096), ("1MiB", 2**20)])
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "KiB", "1.5KiB", "-1", "12 parsecs"])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ArgumentError, match="such as 192KiB"):
        parse_bytes(text)


def test_a_table_aligns_its_columns() -> None:
    assert table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc   d"


def test_an_html_table_escapes_its_cells() -> None:
    assert "<td>&lt;b&gt;</td>" in html_table([("head",), ("<b>",)], "caption")
