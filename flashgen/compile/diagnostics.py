"""A compiler's log in terms of the templates: each error with the file, line and text to mend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.errors import CompileError
from flashgen.render.amalgamation.line_directives import presumed_origins
from flashgen.render.engine import rendered_lines
from flashgen.render.paths import quoted
from flashgen.render.source import Origin

if TYPE_CHECKING:
    from flashgen.render import KernelSource

#: Logs are cut here: a template error inside a loop can repeat itself for megabytes.
LONGEST_LOG = 64 * 1024
_PLACE = re.compile(
    r"(?P<file>[^\s()]+)\((?P<line>\d+)\): (?P<kind>catastrophic error|error|warning|remark)(?P<what>.*)"
)
_PTXAS = re.compile(r"ptxas \S.*?, line (?P<line>\d+); (?P<kind>error|fatal)\s*: (?P<what>.*)")
_LOC = re.compile(r"\s*\.loc\s+(\d+) (\d+)")
_FILE = re.compile(r'\s*\.file\s+(\d+) "([^"]*)"')


def explain(source: KernelSource, log: str, with_lines: Callable[[], tuple[str, str]]) -> CompileError:
    """The error to raise for a failed compilation.

    ``with_lines`` compiles again and returns PTX that names its source lines, and the log about it. It is
    called when the assembler complained, which numbers the lines of the PTX and not of the source.
    """
    places = _places(source)
    errors = list(_front_end_errors(places, log))
    if not errors and _PTXAS.search(log):
        errors = list(_assembler_errors(places, *with_lines()))
    count = f"{len(errors)} error{'s' if len(errors) != 1 else ''}" if errors else "see the log"
    return CompileError(
        f"{source.name} does not compile for {source.plan.arch.name}: {count}",
        _capped("\n\n".join(errors) or log),
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the lines of a source come from, and where its ``#line`` directives say that they do.

    The two differ inside tables and loops, so that the text stays readable.
    """

    name: str
    texts: list[str]
    claimed: list[Origin]
    exact: list[Origin]

    def origin(self, file: str, line: int, echo: str = "") -> Origin:
        """The template line behind a place that a compiler names; ``echo`` is the line as it printed it."""
        # Before the first directive a compiler names the text itself.
        wanted = Origin("" if file == f"{self.name}.cu" else file, line)
        # Two lines may claim one place: the echo decides, or else the one that is really there.
        found = [
            (self.texts[at].strip() != echo.strip(), self.exact[at] != wanted, at)
            for at, claim in enumerate(self.claimed)
            if claim == wanted
        ]
        origin = self.exact[min(found)[2]] if found else Origin(file, line)
        return origin if origin.file else Origin(f"{self.name}.cu", origin.line)


def _places(source: KernelSource) -> _Places:
    claimed = presumed_origins(source.text)
    texts = source.text.split("\n")
    lines = rendered_lines(source.plan)
    # An edited source has no template lines of its own beyond what its directives say.
    rendered_here = "".join(f"{line}\n" for line, _ in lines) == source.text
    exact = [origin for _, origin in lines] + claimed[len(lines) :] if rendered_here else claimed
    return _Places(source.name, texts, claimed, exact)


def _front_end_errors(places: _Places, log: str) -> Iterator[str]:
    """Each error of the C++ front end, with what it prints below: the line, a caret, notes."""
    for block in _blocks(log):
        place = _PLACE.match(block[0])
        if place is None or "error" not in place["kind"]:
            continue
        echo = block[1] if len(block) > 1 else ""
        origin = places.origin(place["file"], int(place["line"]), echo)
        headline = f"{origin.file}:{origin.line}: {place['kind']}{place['what']}"
        yield "\n".join([headline, *_quotation(origin), *block[1:]])


def _blocks(log: str) -> Iterator[list[str]]:
    """The diagnostics of a log: each starts with its place and ends before an empty line or the next one."""
    block: list[str] = []
    for line in log.splitlines():
        if block and (_PLACE.match(line) or not line.strip()):
            yield block
            block = []
        if line.strip():
            block.append(line)
    if block:
        yield block


def _assembler_errors(places: _Places, ptx: str, log: str) -> Iterator[str]:
    """Each error of the assembler, which names lines of the PTX."""
    lines = ptx.splitlines()
    files = {match[1]: match[2] for match in map(_FILE.match, lines) if match}
    for match in map(_PTXAS.match, log.splitlines()):
        if match is None:
            continue
        number = int(match["line"])
        instruction = lines[number - 1].strip() if number <= len(lines) else "unknown"
        message = f"{match['kind']}: {match['what']}"
        loc = next((loc for line in reversed(lines[:number]) if (loc := _LOC.match(line))), None)
        if loc is None:
            yield f"{message}\n    in the PTX: {instruction}"
            continue
        origin = places.origin(_as_claimed(files.get(loc[1], ""), places), int(loc[2]))
        yield "\n".join(
            [f"{origin.file}:{origin.line}: {message}", *_quotation(origin), f"    in the PTX: {instruction}"]
        )


def _as_claimed(path: str, places: _Places) -> str:
    """The file as our directives spell it; the compiler puts its working directory in front."""
    names = {origin.file for origin in places.claimed if origin.file} | {f"{places.name}.cu"}
    return next((name for name in sorted(names) if path == name or path.endswith("/" + name)), path)


def _quotation(origin: Origin) -> list[str]:
    text = quoted(origin)
    return [text] if text else []


def _capped(text: str) -> str:
    return text if len(text) <= LONGEST_LOG else text[:LONGEST_LOG] + "\n... (the log goes on)"
