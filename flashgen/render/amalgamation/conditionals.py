"""Resolves the conditionals that an amalgamated source decides itself: ``#ifdef`` of a macro of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from flashgen.render.amalgamation.amalgamate import Line

_DIRECTIVE = re.compile(r"\s*#\s*(ifdef|ifndef|if|elif|else|endif|define|undef)\b\s*(\w*)")
#: Macros that a compiler's command line defines, or not.
_EXTERNAL = ("FLASHGEN_", "__")


@dataclass(slots=True)
class _Conditional:
    """A conditional that is open."""

    #: Whether its branches are chosen here; then its directives are left out.
    decided: bool
    #: Whether the lines of its open branch stay.
    taken: bool
    #: Whether no later branch can be taken.
    over: bool = False


def resolved(lines: Sequence[Line]) -> list[Line]:
    """``lines`` without the branches that no compiler takes, and without the directives around the others."""
    work = _Resolution()
    for text, origin in lines:
        directive = _DIRECTIVE.match(text) if "#" in text else None
        kept: str | None = text if work.is_taken else None
        if directive is not None:
            kept = work.follow(text, directive[1], directive[2])
        if kept is not None:
            work.out.append((kept, origin))
    return work.out


@dataclass(slots=True)
class _Resolution:
    out: list[Line] = field(default_factory=list)
    #: Whether a macro is defined; None where that depends on a conditional that the compiler decides.
    defined: dict[str, bool | None] = field(default_factory=dict)
    open: list[_Conditional] = field(default_factory=list)

    @property
    def is_taken(self) -> bool:
        # Most lines stand in no conditional.
        return not self.open or all(conditional.taken for conditional in self.open)

    def follow(self, text: str, kind: str, name: str) -> str | None:
        """The directive as it stays in the source; None where it does not."""
        if kind in ("if", "ifdef", "ifndef"):
            return self._begin(text, kind, name)
        if kind in ("define", "undef"):
            return self._define(text, kind, name)
        last = self.open.pop() if kind == "endif" else self.open[-1]
        if not last.decided:
            return text if self.is_taken else None
        if kind == "else":
            last.taken = not last.over
        elif kind == "elif" and last.over:
            last.taken = False
        elif kind == "elif":
            # No branch before it is taken, so the compiler decides the rest.
            last.decided, last.taken = False, True
            return text.replace("elif", "if", 1)
        return None

    def _begin(self, text: str, kind: str, name: str) -> str | None:
        if not self.is_taken:
            # All of it goes.
            self.open.append(_Conditional(decided=True, taken=False, over=True))
            return None
        known = None if kind == "if" or name.startswith(_EXTERNAL) else self.defined.get(name, False)
        if known is None:
            self.open.append(_Conditional(decided=False, taken=True))
            return text
        taken = known == (kind == "ifdef")
        self.open.append(_Conditional(decided=True, taken=taken, over=taken))
        return None

    def _define(self, text: str, kind: str, name: str) -> str | None:
        if not self.is_taken:
            return None
        is_certain = all(conditional.decided for conditional in self.open)
        self.defined[name] = kind == "define" if is_certain else None
        return text
