"""The table of contents at the top of a source: each section with the line it begins on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_LABEL = "contents "
_FILE = re.compile(r'#line \d+ "([^"]+)"')
_KERNEL_FOLDER = "kernels/"
_KERNEL_TITLE = "The kernel: its configuration, parameters and text."


def contents(top: int, code: Sequence[str]) -> list[str]:
    """The comment lines of the table, for ``code`` below a comment of ``top`` lines; none for a short source."""
    sections = list(_sections(code))
    if not top or len(sections) < 2:
        return []
    # The table itself moves what is below it; lines count from 1.
    shift = top + len(sections) + 2
    width = len(str(shift + len(code)))
    rows = [f"{number + shift:>{width}}  {title}" for number, title in sections]
    return ["//", *(f"// {_LABEL if not n else ' ' * len(_LABEL)}{row}" for n, row in enumerate(rows))]


def _sections(code: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Where the text of each header begins, with the first sentence of its comment; last the kernel's own text."""
    seen: set[str] = set()
    for number, text in enumerate(code[:-1]):
        file = _FILE.match(text)
        if file is None or file[1] in seen:
            continue
        seen.add(file[1])
        if file[1].startswith(_KERNEL_FOLDER):
            yield number + 1, _KERNEL_TITLE
            return
        if code[number + 1].startswith("// "):
            yield number + 1, _first_sentence(code, number + 1)


def _first_sentence(code: Sequence[str], number: int) -> str:
    words: list[str] = []
    while code[number].startswith("// ") and not (words and words[-1].endswith((".", ":"))):
        words += code[number].split()[1:]
        number += 1
    text = " ".join(words)
    for end in (". ", ": ", "; "):
        text = text.split(end)[0]
    return text.rstrip(".:;") + "."
