"""Finds the declarations of a source: their lines, their names, and what they mention.

This reads the C++ of flashgen's own headers and templates, not all of C++: declarations begin on a line of their own,
and macros that declare something do so with ``struct``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress, pairwise

_TOKEN = re.compile(
    r"""(?P<comment>//.*)|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<word>[A-Za-z_]\w*)"""
    r"""|\d[\w.']*(?:[+-]\d+)?|->|::|[^\s\w]"""
)
_MACRO = re.compile(r"\s*#\s*(define|undef)\s+(\w+)")
_PASTED = re.compile(r"(\w+)##")
_STRUCT = re.compile(r"\bstruct\s+(\w+)")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_BRACKETS = frozenset("()[]{}")
_ATTRIBUTES = frozenset({"alignas", "__attribute__"})
_TYPES = frozenset({"struct", "class", "union", "enum"})
_KERNELS = frozenset({"FLASHGEN_KERNEL", "__global__"})
_ROOTS = frozenset({"extern", "friend", "public", "private"}) | _KERNELS


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a source, one entry of each list for every token."""

    texts: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    is_word: list[bool] = field(default_factory=list)

    def add(self, text: str, line: int) -> None:
        """Append those of a line."""
        texts, is_word = _tokens(text)
        self.texts.extend(texts)
        self.is_word.extend(is_word)
        self.lines.extend([line] * len(texts))

    def words(self, first: int, end: int) -> frozenset[str]:
        """The identifiers between two tokens. Of those that are called it has a second form, ``name(``."""
        return _words(self.texts[first:end], self.is_word[first:end])

    def closings(self) -> dict[int, int]:
        """The place of each opening bracket, and of the one that closes it."""
        found: dict[int, int] = {}
        open_: dict[str, list[int]] = {closing: [] for closing in _CLOSING.values()}
        for at, text in enumerate(self.texts):
            if text not in _BRACKETS:
                continue
            if text in _CLOSING:
                open_[_CLOSING[text]].append(at)
            elif open_.get(text):
                found[open_[text].pop()] = at
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Declaration:
    """A macro, a declaration at namespace scope, or a member of a struct, with the comment right above it."""

    first: int
    last: int
    #: The name that reaches it, of a function ``name(``; empty if nothing names it.
    name: str
    #: The identifiers it mentions, without those of its members, and ``name(`` where it calls something.
    words: frozenset[str]
    #: Types without which it is of no use: element types of an overload, and all that a specialization is for.
    element_types: frozenset[str] = frozenset()
    members: tuple[Declaration, ...] = ()
    #: A ``static_assert``: kept where all that it mentions is.
    is_assertion: bool = False
    #: Beginnings of macro names that a macro completes.
    pasted: tuple[str, ...] = ()

    @property
    def is_kernel(self) -> bool:
        """Whether it is the function that a launch calls."""
        return not self.name and bool(self.words & _KERNELS)

    @property
    def is_root(self) -> bool:
        """Whether it is reached without being named."""
        return not self.name and not self.is_assertion


def parse(texts: Sequence[str]) -> list[Declaration]:
    """All declarations at namespace scope, and macros, in no particular order."""
    macros: list[Declaration] = []
    tokens = Tokens()
    number = 0
    while number < len(texts):
        text, first = texts[number], number
        macro = _MACRO.match(text) if "#" in text else None
        if macro is not None:
            while texts[number].endswith("\\"):
                number += 1
            macros.append(_macro(macro, texts, first, number))
        elif not text.lstrip().startswith("#"):
            tokens.add(text, number)
        number += 1
    declared = {macro.name: _declared_by(macro, texts) for macro in macros}
    return [*macros, *_Parser(texts, tokens, tokens.closings(), declared).scope(0, len(tokens.texts), "")]


@lru_cache(maxsize=2**14)
def _tokens(text: str) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """The tokens of a line, and which of them are words: kernels share most of their headers' lines."""
    found = [token for token in _TOKEN.finditer(text) if token["comment"] is None]
    return tuple(token[0] for token in found), tuple(token["word"] is not None for token in found)


def _words(texts: Sequence[str], is_word: Sequence[bool]) -> frozenset[str]:
    words = frozenset(compress(texts, is_word))
    return words.union(f"{text}(" for text, after in pairwise(texts) if after in "(<" and text in words)


def _macro(found: re.Match[str], texts: Sequence[str], first: int, last: int) -> Declaration:
    body = "\n".join(texts[first : last + 1])
    words = _words(*_tokens(body)) - {"define", "undef", found[2]}
    return Declaration(_with_comment(texts, first), last, found[2], words, pasted=tuple(_PASTED.findall(body)))


def _declared_by(macro: Declaration, texts: Sequence[str]) -> str:
    found = _STRUCT.search("\n".join(texts[macro.first : macro.last + 1]))
    return found[1] if found else ""


def _with_comment(texts: Sequence[str], first: int) -> int:
    while first > 0 and texts[first - 1].lstrip().startswith("//"):
        first -= 1
    return first


@dataclass(frozen=True, slots=True)
class _Parser:
    texts: Sequence[str]
    tokens: Tokens
    #: Opening bracket -> the one that closes it.
    closing: Mapping[int, int]
    #: The struct that each macro declares, if one.
    macros: Mapping[str, str]

    def scope(self, at: int, end: int, struct: str) -> Iterator[Declaration]:
        """The declarations between two tokens; ``struct`` is the one whose members they are."""
        while at < end:
            if self.tokens.texts[at] == "namespace":
                while self.tokens.texts[at] != "{":
                    at += 1
                close = self.closing[at]
                yield from self.scope(at + 1, close, struct)
                at = close + 1
            else:
                stop = self.end_of_declaration(at, end)
                yield self.declaration(at, stop + 1, struct)
                at = stop + 1

    def closing_angle(self, at: int) -> int:
        """The ``>`` that closes the ``<`` at ``at``."""
        depth = 0
        while True:
            text = self.tokens.texts[at]
            if text in _CLOSING:
                at = self.closing[at]
            depth += (text == "<") - (text == ">")
            if depth == 0:
                return at
            at += 1

    def end_of_declaration(self, at: int, end: int) -> int:
        """The last token: a semicolon, or the brace that closes a function's body."""
        if self.tokens.texts[at] in self.macros and self.tokens.texts[at + 1] == "(":
            close = self.closing[at + 1]
            # A macro that declares something, alone on its line.
            if close + 1 == end or self.tokens.lines[close + 1] > self.tokens.lines[close]:
                return close
        while at < end:
            text = self.tokens.texts[at]
            if text == ";":
                return at
            if text in _CLOSING:
                close = self.closing[at]
                goes_on = close + 1 < end and self.tokens.texts[close + 1] in (";", ",", "(", "{")
                if text == "{" and not goes_on:
                    return close
                at = close
            at += 1
        return end - 1

    def element_types(self, first: int, end: int) -> frozenset[str]:
        """The element types among them."""
        return frozenset(word for word in self.tokens.words(first, end) if word.endswith("_t"))

    def declaration(self, begin: int, end: int, struct: str) -> Declaration:
        """The declaration that these tokens are."""
        lines = (_with_comment(self.texts, self.tokens.lines[begin]), self.tokens.lines[end - 1])
        words = self.tokens.words(begin, end)
        at = begin
        while self.tokens.texts[at] == "template":
            at = self.closing_angle(at + 1) + 1
        if self.tokens.texts[at] == "requires":
            # Constraints of flashgen's templates are in parentheses.
            at = self.closing[at + 1] + 1
        kind = self.tokens.texts[at]
        if kind == "static_assert":
            return Declaration(*lines, "", words, is_assertion=True)
        if kind in _TYPES:
            return self.type_(begin, at, end, lines)
        if kind in _ROOTS or (kind == "using" and self.tokens.texts[at + 1] == "namespace"):
            return Declaration(*lines, "", words)
        if kind == "using":
            return Declaration(*lines, self.tokens.texts[at + 1], words - {self.tokens.texts[at + 1]})
        if kind in self.macros and self.tokens.texts[end - 1] == ")":
            return Declaration(*lines, self.struct_of_macros(words), words)
        name, stop = self.name(at, end)
        # What begins with & or * in parentheses is a reference or a pointer to an array.
        is_function = stop < end and self.tokens.texts[stop] == "(" and self.tokens.texts[stop + 1] not in "&*"
        own = {name, f"{name}("}
        # Constructors, operators and data members stay with their struct.
        is_static = is_function or "static" in self.tokens.words(at, stop)
        if struct and (name == struct or not is_static):
            name = ""
        types = self.element_types(at, self.closing[stop] if is_function else stop)
        # What stays with its struct brings its types along.
        reached_by = f"{name}(" if name and is_function else name
        return Declaration(*lines, reached_by, words - own, types if name else frozenset())

    def struct_of_macros(self, words: frozenset[str]) -> str:
        """The struct that macros declare, of those that are mentioned or begin like one that is."""
        for word in sorted(words):
            for macro, struct in self.macros.items():
                if struct and macro.startswith(word):
                    return struct
        return ""

    def name(self, at: int, end: int) -> tuple[str, int]:
        """The name that is declared, and the token that ends the declarator."""
        name = ""
        while at < end:
            text = self.tokens.texts[at]
            if text == "operator":
                return "", next(i for i in range(at + 2, end) if self.tokens.texts[i] == "(")
            if text in _ATTRIBUTES:
                at = self.closing[at + 1]
            elif text == "<" and name:
                at = self.closing_angle(at)
            elif text in ("(", "=", "{", ";", "[", ":"):
                break
            elif self.tokens.is_word[at]:
                name = text
            at += 1
        return name, at

    def type_(self, begin: int, at: int, end: int, lines: tuple[int, int]) -> Declaration:
        """A struct with its members, or an enumeration."""
        kind = self.tokens.texts[at]
        at += 1
        while self.tokens.texts[at] in ("class", "alignas", "("):
            at = self.closing[at] + 1 if self.tokens.texts[at] == "(" else at + 1
        name = self.tokens.texts[at]
        body = next((i for i in range(at, end) if self.tokens.texts[i] == "{"), end)
        types = self.element_types(at + 1, body)
        if self.tokens.texts[at + 1] == "<":
            # A specialization, for what its arguments name beside its own parameters.
            types |= self.tokens.words(at + 2, self.closing_angle(at + 1)) - self.tokens.words(begin, at)
        if kind == "enum" or body == end:
            return Declaration(*lines, name, self.tokens.words(begin, end) - {name}, types)
        members = tuple(self.scope(body + 1, self.closing[body], name))
        return Declaration(*lines, name, self.tokens.words(begin, body) - {name}, types, members)
