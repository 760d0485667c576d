"""Decides ``if constexpr`` of headers where the printed config says which branch a kernel takes.

Headers pass some members of the config on as template parameters of the same name, and never with another value:
``tests/compile/test_pruned.py`` compares the machine code with that of the whole text. Headers are formatted, so that
the lines of a block are indented and its closing brace stands below its ``if``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.render.amalgamation.amalgamate import Line

#: What headers call by the same name everywhere.
_PASSED_ON = frozenset({"async_copy", "access_bytes", "turing", "has_lower", "has_upper", "has_holes"})
_VALUE = re.compile(r"\s+(?:\.|static constexpr bool )(\w+) = (true|false|\d+)[,;]")
_IF = re.compile(r"(\s*)(?:} else )?if constexpr \((!?)(\w+)(?: == (\d+))?\) (.*[{;])$")
_HEADERS = "flashgen/"


def decided(lines: Sequence[Line]) -> list[Line]:
    """``lines`` without the branches of headers that the config rules out, and without the conditions of the others."""
    values: dict[str, set[str]] = {}
    for text, _ in lines:
        value = _VALUE.match(text)
        if value and value[1] in _PASSED_ON:
            values.setdefault(value[1], set()).add(value[2])
    # Masks may differ in what they say of themselves; then nothing is decided.
    known = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    work = _Decision(known)
    work.add(lines)
    return work.out


@dataclass(slots=True)
class _Decision:
    known: Mapping[str, str]
    out: list[Line] = field(default_factory=list)

    def add(self, lines: Sequence[Line]) -> None:
        """Append lines, following what is decided in them."""
        at = 0
        while at < len(lines):
            text, origin = lines[at]
            found = _IF.match(text) if "if constexpr" in text and origin.file.startswith(_HEADERS) else None
            holds = self._holds(found) if found else None
            if found is None or holds is None or text.lstrip().startswith("}"):
                self._append(lines[at])
                at += 1
            elif found[5] != "{":
                # One statement.
                if holds:
                    self._append((found[1] + found[5], origin))
                at += 1
            else:
                at = self._choose(lines, at, found[1])

    def _choose(self, lines: Sequence[Line], at: int, indent: str) -> int:
        """Append the branch that is taken of the chain that begins at a line; where the chain ends."""
        taken = False
        while True:
            end = next(i for i in range(at + 1, len(lines)) if lines[i][0].startswith(f"{indent}}}"))
            text, closing = lines[at][0], lines[end][0].strip()
            found = _IF.match(text)
            holds = text.strip() == "} else {" or (self._holds(found) if found else None)
            if not taken and holds is None:
                # No branch before it is taken, so the compiler decides the rest.
                self._append((text.replace("} else if", "if"), lines[at][1]))
                return at + 1
            if not taken and holds:
                self.add([_dedented(line) for line in lines[at + 1 : end]])
                taken = True
            if closing == "}":
                return end + 1
            at = end

    def _holds(self, condition: re.Match[str]) -> bool | None:
        """Whether a condition holds; None if the config does not say."""
        value = self.known.get(condition[3])
        if value is None or (condition[4] is None) != (value in ("true", "false")):
            return None
        return (value == (condition[4] or "true")) != bool(condition[2])

    def _append(self, line: Line) -> None:
        text = line[0]
        above = self.out[-1][0] if self.out else ""
        if text.strip() == "}" and above.endswith((") {", "const {")):
            # A function of which nothing is left.
            self.out[-1] = (f"{above}}}", self.out[-1][1])
        else:
            self.out.append(line)


def _dedented(line: Line) -> Line:
    return line[0].removeprefix("  "), line[1]
