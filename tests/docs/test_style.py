"""Pages are easy to read as plain text, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

WIDTH = 100
LINK = re.compile(r"\]\(([^()\s]+)\)")
#: A program's output is as wide as it is, and so are kernels.
OUTPUT = re.compile(r"^[ ]*```(?:text|cuda)\n.*?^[ ]*```$", flags=re.MULTILINE | re.DOTALL)
ALL = [*PAGES, *sorted((ROOT / "research").glob("*.md"))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", ALL, ids=name)
def test_lines_end_by_column_100(page: Path) -> None:
    text = OUTPUT.sub(lambda m: "\n" * m[0].count("\n"), page.read_text(encoding="utf-8"))
    wide = [
        f"{name(page)}:{number}"
        for number, line in enumerate(text.splitlines(), start=1)
        # Tables cannot be broken, and a link's target cannot, either.
        if len(LINK.sub("]", line)) > WIDTH and not line.lstrip().startswith(("|", "http"))
    ]
    assert not wide


@pytest.mark.parametrize("page", ALL, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path = link.partition("#")[0]
        if path and not re.match(r"\w+:", path):
            assert (page.parent / path).exists(), f"{name(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_pages_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:benchmarks|docs|flashgen|generated|research|templates|tests)/[\w./-]*\w/?)`", text)
    # Sources include headers as flashgen/name.cuh.
    folders = (ROOT, ROOT / "templates" / "include")
    assert not [path for path in named if not any((folder / path).exists() for folder in folders)]
