"""``#line`` directives: as few as tell a compiler the template line of every statement."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from flashgen.render.amalgamation.amalgamate import Line
from flashgen.render.source import Origin

#: Macros that print the plan's tables and expressions. Their lines are counted on from what stands above: directives
#: around each would be longer than the table, and their exact origins are kept with the source.
_TABLES = ("kernels/common.j2", "kernels/expressions.j2")
_DIRECTIVE = re.compile(r'#line ([0-9]+)(?: "([^"]*)")?$')
_COMMENT = re.compile(r"\s*//")
#: Lines that no compiler complains about: closing braces and the ends of conditionals.
_CLOSING = re.compile(r"[\s{}();,]*(//.*)?$|\s*#\s*(if|ifdef|ifndef|elif|else|endif|include)\b")
_OPENS_CONDITIONAL = re.compile(r"\s*#\s*if")
_TURNS_CONDITIONAL = re.compile(r"\s*#\s*(elif|else|endif)\b")


def with_directives(lines: list[Line]) -> list[Line]:
    """``lines`` with ``#line`` where the mapping to templates jumps.

    Comments, tables and closing braces never need one; that for code below a comment goes above the comment.
    Lines that repeat one template line (a loop around it) are counted on, not sent back each time.
    """
    placing = _Placing()
    for text, origin in lines:
        placing.add(text, origin)
    return placing.out


def presumed_origins(text: str) -> list[Origin]:
    """For each line of a text the place that its ``#line`` directives claim; file "" before the first one."""
    origins = []
    file, number = "", 0
    for line in text.split("\n"):
        number += 1
        origins.append(Origin(file, number))
        directive = _DIRECTIVE.match(line)
        if directive:
            file, number = directive[2] or file, int(directive[1]) - 1
    return origins


@dataclass(slots=True)
class _Placing:
    out: list[Line] = field(default_factory=list)
    #: What a compiler takes the next line for; in no file if it does not know.
    presumed_file: str = ""
    presumed_line: int = 0
    #: How many lines of ``out`` are settled.
    settled: int = 0
    #: For each open #if: whether a directive stands inside it.
    conditionals: list[bool] = field(default_factory=list)
    previous: Origin | None = None
    continued: bool = False

    def add(self, text: str, origin: Origin) -> None:
        """Append one line, and a directive above it if it needs one."""
        is_comment = not text or _COMMENT.match(text) is not None
        as_presumed = origin.line == self.presumed_line and origin.file == self.presumed_file
        may_need_one = not (as_presumed or is_comment or self.continued or origin == self.previous)
        if may_need_one and origin.file not in _TABLES and not _CLOSING.match(text):
            self._direct(origin)
        self.out.append((text, origin))
        self.presumed_line += 1
        if "#" in text:
            self._follow_conditional(text)
        if not is_comment:
            self.settled = len(self.out)
        if text:
            self.previous = origin
        # Nothing may come between the lines of one macro definition.
        self.continued = text.endswith("\\")

    def _direct(self, origin: Origin) -> None:
        """Put a directive above the comments before the coming line, so numbered that this line is right."""
        at = len(self.out)
        while at > self.settled and self.out[at - 1][1].file == origin.file:
            at -= 1
        while at < len(self.out) and not self.out[at][0]:
            at += 1
        if origin.line <= len(self.out) - at:
            at = len(self.out)
        line = origin.line - (len(self.out) - at)
        directive = f"#line {line}" if self.presumed_file == origin.file else f'#line {line} "{origin.file}"'
        self.out.insert(at, (directive, Origin(origin.file, line)))
        self.presumed_file, self.presumed_line = origin
        self.conditionals = [True] * len(self.conditionals)

    def _follow_conditional(self, text: str) -> None:
        if _OPENS_CONDITIONAL.match(text):
            self.conditionals.append(False)
            return
        turn = _TURNS_CONDITIONAL.match(text)
        if turn and self.conditionals:
            # A directive inside a branch that is skipped counts for nothing, so after it all bets are off.
            if self.conditionals[-1]:
                self.presumed_file = ""
            if turn[1] == "endif":
                self.conditionals.pop()
