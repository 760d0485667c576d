"""Removes from an amalgamated source every declaration that its kernel does not reach.

A declaration is reached when a reached declaration mentions its name, and a function when one calls it. The pass knows
tokens and brackets, not types: of a mentioned name it keeps all overloads and all members. Two refinements: an overload
for an element type, such as ``half_t``, and a specialization for any type also need that type to be reached; and where
macros complete the names of others by numbers, these are the only argument of a macro.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flashgen.render.amalgamation.amalgamate import Line
from flashgen.render.amalgamation.conditionals import resolved
from flashgen.render.amalgamation.decide import decided, known_values
from flashgen.render.amalgamation.declarations import Declaration, parse

#: The only argument of a macro: in a definition, which may call a macro that it is given, of any name.
_ARGUMENT = re.compile(r"\w\((\d+)\)")
_MACRO_ARGUMENT = re.compile(r"\b[A-Z][A-Z_0-9]*\((\d+)\)")


def prune(lines: Sequence[Line]) -> list[Line]:
    """``lines`` without the declarations that the kernel does not reach, one section for each header."""
    lines = resolved(lines)
    while True:
        shorter = _reached(decided(lines, known_values(lines)))
        # The policies that are left say more, and what they rule out may reach others.
        if shorter == lines:
            return lines
        lines = shorter


def _reached(lines: list[Line]) -> list[Line]:
    declarations = parse([text for text, _ in lines])
    if not any(one.is_kernel for one in declarations):
        return lines
    reach = _Reach(frozenset(number for text, _ in lines for number in _numbers(text)))
    for declaration in declarations:
        reach.register(declaration)
    reach.follow(one for one in declarations if one.is_root)
    dropped = set(reach.unreached_lines(declarations))
    files = {lines[one.first][1].file for one in declarations if one.first not in dropped}
    described = {number for one in declarations for number in range(one.first, one.last + 1)}
    for number, (text, origin) in enumerate(lines):
        # The comment of a header of which nothing is left.
        if text.startswith("//") and number not in described and origin.file not in files:
            dropped.add(number)
    return _tidied([line for number, line in enumerate(lines) if number not in dropped])


def _numbers(text: str) -> list[str]:
    return (_ARGUMENT if text.startswith("#") else _MACRO_ARGUMENT).findall(text)


@dataclass(slots=True)
class _Reach:
    """The declarations of a source, and which of them are reached."""

    #: Numbers that are the only argument of a macro.
    numbers: frozenset[str]
    by_name: dict[str, list[Declaration]] = field(default_factory=lambda: defaultdict(list))
    words: set[str] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)

    def register(self, declaration: Declaration) -> None:
        """Make a declaration reachable by its name."""
        self.by_name[declaration.name].append(declaration)

    def follow(self, roots: Iterable[Declaration]) -> None:
        """Reach these and all that they mention, directly or not."""
        queue = list(roots)
        waiting: list[Declaration] = []
        while queue:
            one = queue.pop()
            if id(one) in self.reached:
                continue
            if not self._has_types(one):
                waiting.append(one)
            else:
                queue += self._visit(one)
            if not queue:
                queue = [one for one in waiting if self._has_types(one)]
                waiting = [one for one in waiting if not self._has_types(one)]

    def unreached_lines(self, declarations: Iterable[Declaration]) -> Iterable[int]:
        """The lines of each declaration that is not reached, and of such members of those that are."""
        for one in declarations:
            if id(one) in self.reached or (one.is_assertion and self._known(one.words) <= self.words):
                yield from self.unreached_lines(one.members)
            else:
                yield from range(one.first, one.last + 1)

    def _visit(self, one: Declaration) -> list[Declaration]:
        """Mark a declaration as reached; what this reaches next."""
        self.reached.add(id(one))
        found: list[Declaration] = []
        for word in one.words - self.words:
            self.words.add(word)
            found += self.by_name.get(word, ())
        for prefix in one.pasted:
            found += [macro for name in self.by_name if self._completes(prefix, name) for macro in self.by_name[name]]
        for member in one.members:
            self.register(member)
            if member.is_root or member.name in self.words:
                found.append(member)
        return found

    def _completes(self, prefix: str, name: str) -> bool:
        """Whether a macro may be called by a name that begins so."""
        if not name.startswith(prefix):
            return False
        ending = name.removeprefix(prefix)
        return not ending.isdigit() or ending in self.numbers

    def _has_types(self, one: Declaration) -> bool:
        return self._known(one.element_types) <= self.words

    def _known(self, words: frozenset[str]) -> set[str]:
        """Those of some words that this source declares."""
        return {word for word in words if word in self.by_name}


def _tidied(lines: Iterable[Line]) -> list[Line]:
    """``lines`` without empty blocks, with one namespace for neighboring headers, and single blank lines."""
    out: list[Line] = []
    for text, origin in lines:
        last = out[-1][0] if out else ""
        if not text:
            if (last and not last.endswith("{")) or last.startswith("namespace"):
                out.append((text, origin))
            continue
        if out and not last and text.strip() in ("}", "};"):
            out.pop()
        if text.startswith("}  // namespace") or text == "#endif":
            while out and not out[-1][0]:
                out.pop()
            if out and _opens(out[-1][0], text):
                out.pop()
                continue
            if text == "#endif" and out[-1][0] == "#else":
                out.pop()
            elif text != "#endif":
                out.append(("", origin))
        elif text == "namespace flashgen {" and (reopened := _reopened(out)) is not None:
            del out[reopened : reopened + 1 + (reopened + 1 < len(out) and not out[reopened + 1][0])]
            continue
        out.append((text, origin))
    if not any(text == "namespace flashgen {" for text, _ in out):
        # A kernel that needs none of it, as in tests, cannot open it either.
        out = [line for line in out if line[0] != "using namespace flashgen;"]
    return out


def _opens(opening: str, closing: str) -> bool:
    """Whether one line opens the block that the other closes."""
    if closing == "#endif":
        return opening.startswith("#if")
    return opening == f"{closing.removeprefix('}  // ')} {{"


def _reopened(out: Sequence[Line]) -> int | None:
    """Where the namespace ends that a line would open again, with nothing but comments in between."""
    for at in range(len(out) - 1, -1, -1):
        text = out[at][0]
        if text == "}  // namespace flashgen":
            return at
        if text and not text.startswith("//"):
            return None
    return None
