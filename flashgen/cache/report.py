"""What the cache says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The size and contents of a cache directory."""

    root: Path
    entries: int
    bytes: int
    #: Damaged entries that were moved aside and are kept for inspection.
    bad: int
    #: The compiler builds that made the entries.
    compilers: tuple[str, ...]
    #: How many of the entries are cubins, rendered sources, and libraries of the emulator.
    kinds: dict[str, int]


@dataclass(frozen=True, slots=True)
class BadFile:
    """An entry that must not be loaded, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The outcome of checking every entry."""

    good: int
    bad: tuple[BadFile, ...]

    @property
    def ok(self) -> bool:
        """Whether every entry is whole."""
        return not self.bad
