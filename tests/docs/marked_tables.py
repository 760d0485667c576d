"""Tables of pages that code makes: each stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.

UPDATE_DOCS=1 writes them; read the diff.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

_MARKED = re.compile(r"<!-- table: ([^>]+?) -->\n(.*?)<!-- end of table -->", flags=re.DOTALL)


def marked_tables(page: Path, make: Callable[[], dict[str, str]]) -> dict[str, str]:
    """The tables of a page by name, written anew by ``make`` if UPDATE_DOCS=1."""
    text = page.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_DOCS") == "1":
        made = make()
        text = _MARKED.sub(lambda m: f"<!-- table: {m[1]} -->\n{made.get(m[1], '')}<!-- end of table -->", text)
        page.write_text(text, encoding="utf-8")
    return dict(_MARKED.findall(text))


def table(heads: Sequence[str], lines: Sequence[str]) -> str:
    """A table of Markdown whose ``lines`` are complete."""
    return "\n".join([f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|", *lines]) + "\n"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
