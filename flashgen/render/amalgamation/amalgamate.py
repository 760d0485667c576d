"""Headers in place: every ``#include "flashgen/..."`` becomes the header's text, once each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from flashgen.errors import CompileError
from flashgen.render.paths import include_dir
from flashgen.render.source import Origin

Line = tuple[str, Origin]

#: As in .clang-format.
COLUMN_LIMIT = 110

_INCLUDE = re.compile(r'\s*#\s*include\s*(?:"([^"]*)"|(<.*>|.*))')
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
_CONDITIONAL = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b")
_DEFINED = re.compile(r"\s*#\s*if\s+(!?)defined\((\w+)\)\s*$")
#: The emulator's headers stay outside: they mean something only to a C++ compiler with an include path.
_EMULATOR = "flashgen/emu/"


def amalgamate(lines: list[Line]) -> list[Line]:
    """``lines`` with all flashgen headers in place, ``#pragma once`` gone and blank lines never doubled."""
    work = _Amalgamation()
    work.add(lines)
    return work.out


@dataclass(slots=True)
class _Amalgamation:
    #: Looked for once, not for each of some forty headers.
    headers: Path = field(default_factory=include_dir)
    out: list[Line] = field(default_factory=list)
    #: Header -> the preprocessor branches it was put into.
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: One condition for each branch of an #if that is open now: equal ones hold together.
    branches: list[str] = field(default_factory=list)
    branches_seen: int = 0

    def add(self, lines: Iterable[Line]) -> None:
        """Append lines, following includes."""
        for text, origin in lines:
            include = _INCLUDE.match(text) if "#" in text else None
            if include is None or (include[1] or "").startswith(_EMULATOR):
                self._append(text, origin)
            else:
                self._include(include[1], origin, text)

    def _append(self, text: str, origin: Origin) -> None:
        if not text and (not self.out or not self.out[-1][0] or _CONDITIONAL.match(self.out[-1][0])):
            return
        if "#" in text:
            self._follow_conditional(text)
        self.out.append((text, origin))

    def _follow_conditional(self, text: str) -> None:
        match = _CONDITIONAL.match(text)
        if match is None:
            return
        opens = match[1] in ("if", "ifdef", "ifndef")
        before = self.branches.pop() if self.branches and not opens else ""
        if match[1] != "endif":
            self.branches_seen += 1
            self.branches.append(_condition(text, before if match[1] == "else" else "", self.branches_seen))

    def _include(self, name: str | None, origin: Origin, text: str) -> None:
        if name is None or not name.startswith("flashgen/"):
            raise _refusal(origin, f"{text.strip()} cannot be included; kernels stand on flashgen's own headers alone")
        here = tuple(self.branches)
        if name in self.seen:
            # Text that stands in one branch of an #if is missing where that branch is not taken.
            if self.seen[name] != here[: len(self.seen[name])]:
                raise _refusal(
                    origin,
                    f"{name} is already in place inside an #if that does not reach here; "
                    "include the header that holds the #if instead",
                )
            return
        self.seen[name] = here
        self.add(_read_header(self.headers, name, origin))


def _condition(text: str, before: str, number: int) -> str:
    """What holds below a conditional; ``before`` what held above, if this is its #else."""
    defined = _DEFINED.match(text)
    if defined is not None:
        return f"{defined[1]}defined({defined[2]})"
    # Of other conditions we do not know which are the same: each is one of its own.
    simple = before.lstrip("!").startswith("defined(")
    return f"branch {number}" if not simple else before[1:] if before.startswith("!") else f"!{before}"


def _read_header(headers: Path, name: str, included_at: Origin) -> tuple[Line, ...]:
    try:
        text = (headers / name).read_text(encoding="utf-8")
    except OSError:
        raise _refusal(included_at, f"there is no header {name} under {headers}") from None
    return _lines_of(name, text)


@lru_cache(maxsize=128)
def _lines_of(name: str, text: str) -> tuple[Line, ...]:
    """A header's lines as they go into a source: every kernel takes most of the same headers."""
    lines = [
        (line.rstrip(), Origin(name, number))
        for number, line in enumerate(text.splitlines(), start=1)
        if not _PRAGMA_ONCE.match(line)
    ]
    # The comment that opens a header goes below what the header includes, next to what it speaks of.
    comment = list(takewhile(lambda line: line[0].startswith("//"), lines))
    includes = list(takewhile(lambda line: _INCLUDE.match(line[0]) or not line[0], lines[len(comment) :]))
    return (
        *includes,
        *comment,
        *_separated(comment, lines[len(comment) + len(includes) :]),
        ("", Origin(name, len(lines))),
    )


def _separated(comment: list[Line], rest: list[Line]) -> list[Line]:
    return [("", comment[-1][1]), *rest] if comment else rest


def _refusal(origin: Origin, message: str) -> CompileError:
    return CompileError(f"{origin.file}:{origin.line}: {message}")
