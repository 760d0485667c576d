"""Resolves the conditionals that an amalgamated source decides itself: ``#ifdef`` of a macro of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flashgen.render.amalgamation.amalgamate import Line

_DIRECTIVE = re.compile(r"\s*#\s*(ifdef|ifndef|if|elif|else|endif|define)\b\s*(\w*)")
#: Macros that a compiler's command line defines, or not.
_EXTERNAL = ("FLASHGEN_", "__")


def resolved(lines: Sequence[Line]) -> list[Line]:
    """``lines`` without the branches that no compiler takes, and without the directives around the others."""
    out: list[Line] = []
    defined: set[str] = set()
    #: For each open conditional: whether it is decided here, and whether its open branch is taken.
    open_: list[tuple[bool, bool]] = []
    for text, origin in lines:
        directive = _DIRECTIVE.match(text) if "#" in text else None
        kind, name = (directive[1], directive[2]) if directive else ("", "")
        if kind in ("ifdef", "ifndef") and not name.startswith(_EXTERNAL):
            open_.append((True, (name in defined) == (kind == "ifdef")))
            continue
        if kind in ("if", "ifdef", "ifndef"):
            open_.append((False, True))
        elif kind == "else" and open_[-1][0]:
            open_[-1] = (True, not open_[-1][1])
            continue
        elif kind == "endif" and open_.pop()[0]:
            continue
        if all(taken for _, taken in open_):
            if kind == "define":
                defined.add(name)
            out.append((text, origin))
    return out
