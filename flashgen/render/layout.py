"""Filters for the layout of the rendered source, which templates cannot do themselves."""

from __future__ import annotations

from itertools import groupby

from flashgen.render.amalgamation.marks import without_marks

#: As in .clang-format.
COLUMN_LIMIT = 110


def camel(name: str) -> str:
    """``kv_ring`` -> ``KvRing``, for constants such as ``kKvRing``."""
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def trailing_comment(note: str) -> str:
    """``  // note``, or nothing when there is no note."""
    return f"  // {note}" if note else ""


def align_comments(text: str) -> str:
    """Trailing ``//`` comments of neighbours in one column; above the lines where that is too wide."""
    out: list[str] = []
    for has_comment, group in groupby(text.split("\n"), key=_has_trailing_comment):
        lines = list(group)
        out += _aligned(lines) if has_comment else lines
    return "\n".join(out)


def _has_trailing_comment(line: str) -> bool:
    code, slashes, _ = without_marks(line).partition("//")
    return bool(slashes and code.strip())


def _aligned(lines: list[str]) -> list[str]:
    rows = []
    for line in lines:
        code, _, comment = line.partition("//")
        code = code.rstrip()
        rows.append((code, len(without_marks(code)), without_marks(comment).strip()))
    column = max(width for _, width, _ in rows) + 2
    if any(column + 3 + len(comment) > COLUMN_LIMIT for _, _, comment in rows):
        return [line for code, _, comment in rows for line in (f"{_indent(code)}// {comment}", code)]
    return [f"{code}{' ' * (column - width)}// {comment}" for code, width, comment in rows]


def _indent(code: str) -> str:
    plain = without_marks(code)
    return " " * (len(plain) - len(plain.lstrip()))
