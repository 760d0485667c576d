"""``KernelSource``: the text of one kernel."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from flashgen.plan.model.plans import KernelPlan

_TOP = re.compile(r"(?://[^\n]*\n)*")


class Origin(NamedTuple):
    """A line of a template or header, by its path under the templates directory."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One self-contained ``.cu`` file for NVRTC, and for g++ with the emulator."""

    plan: KernelPlan = field(repr=False)
    text: str = field(repr=False)

    @property
    def name(self) -> str:
        """The ``extern "C"`` symbol and file stem."""
        return self.plan.name

    @property
    def code(self) -> str:
        """The text below the comment at its top: all that a compiler sees."""
        return code_of(self.text)

    @property
    def digest(self) -> str:
        """SHA-256 of the text, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def code_of(text: str) -> str:
    """A source without the comment at its top, which names numbers that come with each call."""
    top = _TOP.match(text)
    return text[top.end() :] if top else text
