"""A compiler's log in terms of the templates: each error with the file, line and text to mend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.errors import CompileError
from flashgen.render.lines import line_table
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
    places = _Places(f"{source.name}.cu", line_table(source))
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
    """Where the lines that a compiler names are written."""

    file: str
    origins: list[Origin]

    def origin(self, file: str, line: int) -> Origin:
        """The template or header line behind a place that a compiler names."""
        # The compiler puts its working directory in front; an edited text may have #line directives of its own.
        is_ours = file == self.file or file.endswith("/" + self.file)
        return self.origins[line - 1] if is_ours and line <= len(self.origins) else Origin(file, line)


def _front_end_errors(places: _Places, log: str) -> Iterator[str]:
    """Each error of the C++ front end, with what it prints below: the line, a caret, notes."""
    for block in _blocks(log):
        place = _PLACE.match(block[0])
        if place is None or "error" not in place["kind"]:
            continue
        origin = places.origin(place["file"], int(place["line"]))
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
        origin = places.origin(files.get(loc[1], ""), int(loc[2]))
        yield "\n".join(
            [f"{origin.file}:{origin.line}: {message}", *_quotation(origin), f"    in the PTX: {instruction}"]
        )


def _quotation(origin: Origin) -> list[str]:
    text = quoted(origin)
    return [text] if text else []


def _capped(text: str) -> str:
    return text if len(text) <= LONGEST_LOG else text[:LONGEST_LOG] + "\n... (the log goes on)"
