"""Places in a kernel's text: the compiler counts the lines of its code, people look for their templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashgen.render.source import Origin, code_of

#: What the compiler takes every kernel's code for: kernels that differ in no more than their names share a library.
KERNEL_FILE = "emitted.cu"
_PLACE = re.compile(rf"(?:[^\s(]*/)?\b{re.escape(KERNEL_FILE)}:(\d+)")


@dataclass(frozen=True, slots=True)
class Places:
    """Where the lines of one kernel's text are written."""

    name: str
    text: str
    #: The origin of each line of the text. Called when something is wrong: it renders the text again.
    table: Callable[[], Sequence[Origin]] | None = None

    def named(self, message: str) -> str:
        """A message of a compiler or of the runtime, with its places in the code as places in the templates."""
        if KERNEL_FILE not in message:
            return message
        above = self.text.count("\n") - code_of(self.text).count("\n")
        origins = self.table() if self.table else ()

        def origin(place: re.Match[str]) -> str:
            line = int(place[1]) + above
            file, number = origins[line - 1] if line <= len(origins) else (f"{self.name}.cu", line)
            return f"{file}:{number}"

        return _PLACE.sub(origin, message)
