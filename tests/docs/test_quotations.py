"""What pages quote from a file under ``generated/`` is what flashgen writes there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from flashgen.render.golden import GOLDEN, golden_sources
from tests.docs.pages import PAGES, ROOT, Block, blocks

_LEFT_OUT = "..."
QUOTING = [page for page in PAGES if any(block.source for block in blocks(page))]


def missing(quoted: str, source: str) -> str | None:
    """The first line of the first passage that does not follow in the source; indentation is free."""
    rest = [line.strip() for line in source.splitlines()]
    for passage in passages(quoted):
        ends = (at + len(passage) for at in range(len(rest)) if rest[at : at + len(passage)] == passage)
        end = next(ends, None)
        if end is None:
            return passage[0]
        rest = rest[end:]
    return None


def passages(quoted: str) -> list[list[str]]:
    """The lines between those that stand for others."""
    found: list[list[str]] = [[]]
    for line in map(str.strip, quoted.splitlines()):
        if line == _LEFT_OUT:
            found.append([])
        else:
            found[-1].append(line)
    return [passage for passage in found if passage]


@cache
def emitted() -> dict[str, str]:
    """What flashgen writes to ``generated/`` now, by path."""
    return {f"generated/{name}": text for name, text in golden_sources(GOLDEN).items()}


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: str(page.relative_to(ROOT)))
def test_quoted_lines_are_in_what_flashgen_writes(page: Path) -> None:
    for block in blocks(page):
        if block.source is None:
            continue
        assert block.source in emitted(), f"{page.name}:{block.line}: flashgen writes no {block.source}"
        line = missing(block.text, emitted()[block.source])
        assert line is None, f"{page.name}:{block.line}: {block.source} has no passage that begins with {line!r}"


def test_every_block_of_cuda_names_its_source() -> None:
    unnamed: list[Block] = [b for page in PAGES for b in blocks(page) if b.kind == "cuda" and b.source is None]
    assert not unnamed


@pytest.mark.parametrize(
    ("quoted", "expected"),
    [
        ("b\n  c", None),
        ("a\n...\nd", None),
        ("a\nc", "a"),
        ("c\n...\na", "a"),
        ("e", "e"),
    ],
)
def test_passages_are_whole_and_in_order(quoted: str, expected: str | None) -> None:
    assert missing(quoted, "a\n b\n c\nd\n") == expected
