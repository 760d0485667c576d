"""Filters for the layout of the rendered source, which templates cannot do themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from flashgen.plan.model.parts import Param
from flashgen.render.amalgamation.amalgamate import COLUMN_LIMIT
from flashgen.render.amalgamation.marks import without_marks


def camel(name: str) -> str:
    """``kv_ring`` -> ``KvRing``, for constants such as ``kKvRing``."""
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def trailing_comment(note: str) -> str:
    """``  // note``, or nothing when there is no note."""
    return f"  // {note}" if note else ""


def declared_together(params: Iterable[Param]) -> Iterator[Param]:
    """Parameters as C++ declares them: tensor maps on one line, and those whose names begin with the same word."""
    line: Param | None = None
    for param in params:
        longer = None if line is None else _declared_after(line, param)
        if line is not None and longer is None:
            yield line
        line = longer or param
    if line is not None:
        yield line


def _declared_after(line: Param, param: Param) -> Param | None:
    """A line of declarations with one more; None if that needs a line of its own."""
    is_alike = param.kind == "map" or param.name.split("_")[0] == line.name.split("_")[0]
    if not is_alike or param.note or param.declared != line.declared or param.declared.endswith("*"):
        return None
    longer = replace(line, name=f"{line.name}, {param.name}")
    text = f"  {longer.declared} {longer.name};{trailing_comment(longer.note)}"
    return longer if len(text) <= COLUMN_LIMIT else None


def align_comments(text: str) -> str:
    """Trailing ``//`` comments of neighbors in one column; above a line where there is no room for it."""
    out: list[str] = []
    lines = [line for whole in text.split("\n") for line in _with_room(whole)]
    for has_comment, group in groupby(lines, key=_has_trailing_comment):
        rows = list(group)
        out += _aligned(rows) if has_comment else rows
    return "\n".join(out)


def _has_trailing_comment(line: str) -> bool:
    code, slashes, _ = without_marks(line).partition("//")
    return bool(slashes and code.strip())


def _with_room(line: str) -> list[str]:
    """A line, or its comment and then its code if they are too long together."""
    if not _has_trailing_comment(line) or len(without_marks(line)) <= COLUMN_LIMIT:
        return [line]
    code, _, comment = line.partition("//")
    return [f"{_indent(code)}//{without_marks(comment)}", code.rstrip()]


def _aligned(lines: list[str]) -> Iterator[str]:
    """Lines with their comments in one column, as many neighbors at a time as have room for that."""
    run: list[tuple[str, int, str]] = []
    for line in lines:
        code, _, comment = line.partition("//")
        code = code.rstrip()
        row = (code, len(without_marks(code)), without_marks(comment).strip())
        if _column([*run, row]) + 3 + max(len(text) for _, _, text in [*run, row]) > COLUMN_LIMIT:
            yield from _in_column(run)
            run = []
        run.append(row)
    yield from _in_column(run)


def _column(rows: list[tuple[str, int, str]]) -> int:
    return max(width for _, width, _ in rows) + 2


def _in_column(rows: list[tuple[str, int, str]]) -> Iterator[str]:
    for code, width, comment in rows:
        yield f"{code}{' ' * (_column(rows) - width)}// {comment}"


def _indent(code: str) -> str:
    plain = without_marks(code)
    return " " * (len(plain) - len(plain.lstrip()))
