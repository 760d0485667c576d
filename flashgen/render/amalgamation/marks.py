"""Line marks: how each line of a rendered text knows the template line it came from.

Jinja forgets where output came from. So every stretch of template text is marked with its own line before
Jinja compiles it; the marks travel with the text through conditions, loops and macros, and are read off at
the end. They go in after Jinja's lexer has trimmed blocks, so they change no white space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from flashgen.render.source import Origin

# Private-use characters: no template, header or name contains them.
_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}([^{_CLOSE}]*):([0-9]+){_CLOSE}")


class LineMarks(Extension):
    """Marks each line of template text (not of values printed into it)."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Put a mark at the start of every text token and of every line in it."""
        for token in stream:
            if token.type != "data":
                yield token
                continue
            first, *rest = token.value.split("\n")
            marked = [_mark(stream.name, token.lineno) + first]
            marked += [_mark(stream.name, token.lineno + n) + line for n, line in enumerate(rest, start=1)]
            yield Token(token.lineno, "data", "\n".join(marked))


def _mark(name: str | None, line: int) -> str:
    return f"{_OPEN}{name}:{line}{_CLOSE}"


def without_marks(text: str) -> str:
    """``text`` as it will be printed."""
    return _MARK.sub("", text)


def read_marks(marked: str, template: str) -> list[tuple[str, Origin]]:
    """The lines of a marked text, each with the origin of its first visible character.

    A line that a macro begins and ``template`` ends counts as the template's.
    """
    lines = []
    current = Origin(template, 1)
    for marked_line in marked.split("\n"):
        origin, blank = current, True
        # text, file, line, text, file, line, ..., text
        pieces = _MARK.split(marked_line)
        for at in range(0, len(pieces), 3):
            if at:
                current = Origin(pieces[at - 2], int(pieces[at - 1]))
            visible = bool(pieces[at].strip())
            if blank or (visible and current.file == template != origin.file):
                origin = current
            blank = blank and not visible
        lines.append(("".join(pieces[::3]).rstrip(), origin))
    return lines
