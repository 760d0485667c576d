"""Decides ``if constexpr`` of headers where the printed config and the chosen policies say which branch a kernel takes.

Headers pass some members of the config on as template parameters of the same name, and never with another value:
``tests/compile/test_pruned.py`` compares the machine code with that of the whole text. Headers are formatted, so that
the lines of a block are indented and its closing brace stands below its ``if``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.render.amalgamation.amalgamate import COLUMN_LIMIT, Line

#: What headers call by the same name everywhere.
_PASSED_ON = frozenset({"async_copy", "access_bytes", "turing", "has_lower", "has_upper", "has_holes"})
_MEMBER = re.compile(r"\s+\.(\w+) = (true|false|\d+)[,;]")
_CONSTANT = re.compile(r"\s+static constexpr bool (\w+) =\s*(.*?);?$")
_MAINLOOP = re.compile("k[A-Z]")
_TERM = r"(!?)((?:\w+(?:::|\.))?\w+)(?: (==|>|<) (\d+))?"
_IF = re.compile(rf"(\s*)(?:}} else )?if constexpr \({_TERM}\) (.*[{{;])$")
_CONDITION = re.compile(_TERM)
_HEADERS = "flashgen/"
_Values = Mapping[str, str]


def known_values(lines: Sequence[Line]) -> dict[str, str]:
    """The values of ``cfg.member``, of ``.constant`` of policies, of ``kConstant``, and of names that headers pass on.

    All policies left in the source must agree. Without a qualifier a name may be that of a template parameter, unless
    it begins as constants of mainloops do.
    """
    expressions: dict[str, set[str]] = {}
    for pattern, qualifier in ((_MEMBER, "cfg."), (_CONSTANT, ".")):
        for name, expression in (match.groups() for text, _ in lines if (match := pattern.match(text))):
            if expression.endswith(f"::{name}"):
                # Passed on.
                continue
            expressions.setdefault(f"{qualifier}{name}", set()).add(expression)
            if name in _PASSED_ON or _MAINLOOP.match(name):
                expressions.setdefault(name, set()).add(expression)
    values: dict[str, str] = {}
    # A constant is declared after those that it depends on, and members of the config come first.
    for name, alternatives in expressions.items():
        known = {_evaluated(expression, values) for expression in alternatives}
        if len(known) == 1 and "" not in known:
            values[name] = known.pop()
    return values


def decided(lines: Sequence[Line], values: _Values) -> list[Line]:
    """``lines`` without the branches of headers that are ruled out, and without the conditions of the others."""
    work = _Decision(values)
    work.add(lines)
    return work.out


def _evaluated(expression: str, values: _Values) -> str:
    """The value of a literal or of a disjunction of conditions; empty if it is not known."""
    if expression.isdigit() or expression in ("true", "false"):
        return expression
    terms = [_CONDITION.fullmatch(term) for term in expression.split(" || ")]
    holds = [None if term is None else _holds(term.groups(), values) for term in terms]
    if True in holds:
        return "true"
    return "" if None in holds else "false"


def _holds(term: Sequence[str | None], values: _Values) -> bool | None:
    """Whether a condition holds; None if that is not known."""
    negated, name, comparison, number = term
    assert name is not None
    value = values.get(name, values.get(re.sub(r"^\w+(::|\.)", ".", name)))
    if value is None or (comparison is None) != (value in ("true", "false")):
        return None
    if comparison is None or number is None:
        return (value == "true") != bool(negated)
    return {"==": int(value) == int(number), ">": int(value) > int(number), "<": int(value) < int(number)}[comparison]


@dataclass(slots=True)
class _Decision:
    values: _Values
    out: list[Line] = field(default_factory=list)

    def add(self, lines: Sequence[Line]) -> None:
        """Append lines, following what is decided in them."""
        at = 0
        while at < len(lines):
            text, origin = lines[at]
            found = _IF.match(text) if "if constexpr" in text and origin.file.startswith(_HEADERS) else None
            holds = _holds(found.groups()[1:5], self.values) if found else None
            if found is None or holds is None or text.lstrip().startswith("}"):
                self._append(lines[at])
                at += 1
            elif found[6] != "{":
                # One statement.
                if holds:
                    self._append((found[1] + found[6], origin))
                at += 1
                # Nothing after a return is reached.
                while holds and found[6].startswith("return") and lines[at][0].startswith((found[1], "#")):
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
            holds = text.strip() == "} else {" or (_holds(found.groups()[1:5], self.values) if found else None)
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

    def _append(self, line: Line) -> None:
        text = line[0]
        above = self.out[-1][0] if self.out else ""
        if text.strip() == "}" and above.endswith((") {", "const {")):
            # A function of which nothing is left.
            self.out[-1] = (f"{above}}}", self.out[-1][1])
        elif text.strip() == "}" and (whole := self._on_one_line(above)) is not None:
            self.out[-2:] = [(whole, self.out[-2][1])]
        else:
            self.out.append(line)

    def _on_one_line(self, statement: str) -> str | None:
        """A function of which one statement is left, if it is short enough."""
        opening = self.out[-2][0] if len(self.out) > 1 else ""
        if "FLASHGEN_DEVICE" not in opening or not opening.endswith("{") or not statement.endswith(";"):
            return None
        whole = f"{opening} {statement.strip()} }}"
        return whole if len(whole) <= COLUMN_LIMIT else None


def _dedented(line: Line) -> Line:
    return line[0].removeprefix("  "), line[1]
