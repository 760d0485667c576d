"""The bytes of global memory that a launch reads and writes, by array."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class _Counted(Protocol):
    read: int
    written: int


@dataclass(frozen=True, slots=True)
class LaunchTraffic:
    """The traffic of one launch. A reduction or an atomic counts once, as a write. Caches are not emulated."""

    kernel: str
    read: Mapping[str, int]
    written: Mapping[str, int]


def by_array(kernel: str, names: Sequence[str], counts: Iterable[_Counted]) -> LaunchTraffic:
    """The traffic of a launch from the records of its buffers; unused arrays are left out."""
    read: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for name, count in zip(names, counts, strict=True):
        read[name] += count.read
        written[name] += count.written
    return LaunchTraffic(kernel, dict(+read), dict(+written))
