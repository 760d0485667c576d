"""A band of the score matrix: keys within a window around the query's own position."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.common.checks import is_whole
from flashgen.common.show import show
from flashgen.errors import SpecError

#: A window side is at most this: integers in spec files have 64 bits.
MAX_DISTANCE = 2**63 - 1


def limit_violations(left: object, right: object, *, smallest: int) -> list[str]:
    """What is wrong with the sides of a window, one sentence each; ``smallest`` is the least number a side may be."""
    return [
        f"window {side}={show(value)} is not a distance; use a whole number from 0 to 2**63 - 1, "
        "or None (or -1) for no limit on that side"
        for side, value in (("left", left), ("right", right))
        if value is not None and not is_whole(value, smallest, MAX_DISTANCE)
    ]


@dataclass(frozen=True, slots=True)
class Band:
    """Keys from ``left`` before to ``right`` after the query's own position; None is without limit."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        problems = limit_violations(self.left, self.right, smallest=0)
        if problems:
            raise SpecError(*problems)

    def __and__(self, other: Band) -> Band:
        return Band(_tighter(self.left, other.left), _tighter(self.right, other.right))

    @property
    def is_full(self) -> bool:
        """Whether the band forbids nothing."""
        return self.left is None and self.right is None

    def plain(self) -> tuple[str, str]:
        """Which sides have a limit; a 0 on the right is part of the code, since causal is written as such."""
        left = "open" if self.left is None else "width"
        return left, "open" if self.right is None else "width" if self.right else "zero"


#: A band that forbids nothing.
NO_LIMITS = Band()


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
