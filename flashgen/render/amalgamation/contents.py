"""The table of contents at the top of a source: each section with the line it begins on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashgen.render.amalgamation.amalgamate import Line

_LABEL = "contents "
_HEADERS = "flashgen/"
_KERNEL_TITLE = "The kernel: its configuration, parameters and text."


def contents(top: int, code: Sequence[Line]) -> list[str]:
    """The comment lines of the table, for ``code`` below a comment of ``top`` lines; none for a short source."""
    sections = list(_sections(code))
    if not top or len(sections) < 2:
        return []
    # The table itself moves what is below it; lines count from 1.
    shift = top + len(sections) + 2
    width = len(str(shift + len(code)))
    rows = [f"{number + shift:>{width}}  {title}" for number, title in sections]
    return ["//", *(f"// {_LABEL if not n else ' ' * len(_LABEL)}{row}" for n, row in enumerate(rows))]


def _sections(code: Sequence[Line]) -> Iterator[tuple[int, str]]:
    """Where the text of each header begins, with the first sentence of its comment; last the kernel's own text."""
    seen: set[str] = set()
    below = 0
    for number, (text, origin) in enumerate(code):
        if not text or not origin.file.startswith(_HEADERS):
            continue
        below = number + 1
        if origin.file not in seen and text.startswith("// "):
            yield number, _first_sentence([line for line, _ in code[number:]])
        if not text.startswith("#"):
            seen.add(origin.file)
    start = next((number for number, (text, _) in enumerate(code) if number >= below and text), None)
    if start is not None:
        yield start, _KERNEL_TITLE


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
