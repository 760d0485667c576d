"""Sections of a source, one for each header and one for the kernel, and the table of contents at its top."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from flashgen.render.amalgamation.amalgamate import Line

_LABEL = "contents "
_HEADERS = "flashgen/"
_KERNEL_TITLE = "The kernel: its configuration, parameters and text."
#: Headers of this folder that follow one another share a row.
_PTX = "flashgen/ptx/"
_MARK = "// ---- "
#: A mark names a file. Comments within a file may look like one otherwise.
_SECTION = re.compile(rf"{_MARK}\S+\.\w+")


def with_sections(code: Sequence[Line]) -> list[Line]:
    """``code`` with the name of its header above the comment that opens each section; at the end the kernel's."""
    seen: set[str] = set()
    starts: dict[int, Line] = {}
    below = 0
    for number, (text, origin) in enumerate(code):
        if not text or not origin.file.startswith(_HEADERS):
            continue
        below = number + 1
        if origin.file not in seen and text.startswith("// "):
            starts[number] = (_MARK + origin.file, origin)
        if not text.startswith("#"):
            seen.add(origin.file)
    for number in range(below, len(code)) if starts else ():
        if code[number][0]:
            starts[number] = (_MARK + code[number][1].file, code[number][1])
            break
    return [line for number, old in enumerate(code) for line in (starts.get(number), old) if line is not None]


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
    """Where each section begins, with the first sentence of its comment."""
    marks = [(number, text.removeprefix(_MARK)) for number, text in enumerate(code) if _SECTION.fullmatch(text)]
    for is_ptx, group in groupby(marks, key=lambda mark: mark[1].startswith(_PTX)):
        if is_ptx:
            numbers, files = zip(*group, strict=True)
            names = ", ".join(file.removeprefix(_PTX).removesuffix(".cuh") for file in files)
            yield numbers[0], f"Instructions, one per function: {names}."
            continue
        for number, file in group:
            is_header = file.startswith(_HEADERS)
            yield number, _first_sentence(code[number + 1 :]) if is_header else _KERNEL_TITLE


def _first_sentence(comment: Sequence[str]) -> str:
    words: list[str] = []
    for line in comment:
        if not line.startswith("// ") or (words and words[-1].endswith((".", ":"))):
            break
        words += line.split()[1:]
    text = " ".join(words)
    for end in (". ", ": ", "; "):
        text = text.split(end)[0]
    return text.rstrip(".:;") + "."
