"""Maps lines of a kernel's code to places in templates and headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashgen.render.source import Origin, code_of

#: The file name of every kernel's code, so that kernels that differ only in their names share a library.
KERNEL_FILE = "emitted.cu"
_PLACE = re.compile(rf"(?:[^\s(]*/)?\b{re.escape(KERNEL_FILE)}:(\d+)")


@dataclass(frozen=True, slots=True)
class Places:
    """The origins of the lines of one kernel's text."""

    name: str
    text: str
    #: Returns the origin of each line of the text. It renders the text again, so only findings call it.
    table: Callable[[], Sequence[Origin]] | None = None

    def named(self, message: str) -> str:
        """A message of a compiler or of the runtime, in which places in the code become places in the templates."""
        if KERNEL_FILE not in message:
            return message
        above = self.text.count("\n") - code_of(self.text).count("\n")
        origins = self.table() if self.table else ()

        def origin(place: re.Match[str]) -> str:
            line = int(place[1]) + above
            file, number = origins[line - 1] if line <= len(origins) else (f"{self.name}.cu", line)
            return f"{file}:{number}"

        return _PLACE.sub(origin, message)
