"""Masks: which keys a query may attend to.

Every mask here is a *band* of the score matrix: key ``k`` is allowed for query ``q`` when
``lower <= k - q <= upper``. Bands are closed under ``&``, so any combination of causal masks and
windows is again one band, and a kernel needs only the two numbers, known when the lengths are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashgen.errors import SpecError
from flashgen.spec.show import show

Align = Literal["bottom-right", "top-left"]
ALIGNMENTS: tuple[Align, ...] = ("bottom-right", "top-left")
#: A window side is at most this: integers in spec files have 64 bits.
MAX_DISTANCE = 2**63 - 1


def _limit_violations(left: object, right: object, *, smallest: int) -> list[str]:
    return [
        f"window {side}={show(value)} is not a distance; use a whole number from 0 to 2**63 - 1, "
        "or None (or -1) for no limit on that side"
        for side, value in (("left", left), ("right", right))
        if value is not None
        and (isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= MAX_DISTANCE)
    ]


@dataclass(frozen=True, slots=True)
class Band:
    """Keys from ``left`` before to ``right`` after the query's own position; None is without limit."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        problems = _limit_violations(self.left, self.right, smallest=0)
        if problems:
            raise SpecError(*problems)

    def __and__(self, other: Band) -> Band:
        return Band(_tighter(self.left, other.left), _tighter(self.right, other.right))

    @property
    def is_full(self) -> bool:
        """Whether the band forbids nothing."""
        return self.left is None and self.right is None


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


@dataclass(frozen=True, slots=True)
class Mask:
    """An intersection of bands, one for each way of aligning queries with keys when lengths differ.

    Bottom-right puts the last query on the last key (as flash-attn does); top-left the first on the
    first (as SDPA does). With equal lengths they are the same.
    """

    bottom_right: Band = Band()
    top_left: Band = Band()

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.bottom_right & other.bottom_right, self.top_left & other.top_left)

    @property
    def is_full(self) -> bool:
        """Whether every query attends to every key."""
        return self.bottom_right.is_full and self.top_left.is_full

    @property
    def has_lower(self) -> bool:
        """Whether some limit on the left exists, whatever the lengths."""
        return self.bottom_right.left is not None or self.top_left.left is not None

    @property
    def has_upper(self) -> bool:
        """Whether some limit on the right exists, whatever the lengths."""
        return self.bottom_right.right is not None or self.top_left.right is not None

    def diagonals(self, len_q: int, len_kv: int) -> tuple[int, int]:
        """The band as bounds on ``k - q`` for these lengths, clipped to what can occur."""
        lower, upper = -len_q, len_kv
        for band, shift in ((self.bottom_right, len_kv - len_q), (self.top_left, 0)):
            if band.left is not None:
                lower = max(lower, shift - band.left)
            if band.right is not None:
                upper = min(upper, shift + band.right)
        return max(lower, -len_q), max(-len_q - 1, min(upper, len_kv))

    def describe(self) -> str:
        """The mask in words: ``full``, ``causal``, ``window(left=512, right=0)`` ..."""
        parts = [
            _describe_band(band, align)
            for band, align in ((self.bottom_right, "bottom-right"), (self.top_left, "top-left"))
            if not band.is_full
        ]
        return " & ".join(parts) if parts else "full"


def _describe_band(band: Band, align: str) -> str:
    suffix = "" if align == "bottom-right" else f", align={align}"
    if band == Band(right=0):
        return "causal" if not suffix else f"causal({suffix[2:]})"
    sides = [f"{k}={v}" for k, v in (("left", band.left), ("right", band.right)) if v is not None]
    return f"window({', '.join(sides)}{suffix})"


def full() -> Mask:
    """Every query attends to every key."""
    return Mask()


def causal(align: Align = "bottom-right") -> Mask:
    """A query attends to keys up to its own position."""
    return window(None, 0, align=align)


def window(left: int | None = None, right: int | None = None, *, align: Align = "bottom-right") -> Mask:
    """A query attends to ``left`` keys before and ``right`` keys after its own position, itself included.

    None (or -1, as flash-attn writes it) leaves a side open.
    """
    problems = _limit_violations(left, right, smallest=-1)
    if align not in ALIGNMENTS:
        problems.append(f"align={show(align)} is unknown; use one of {', '.join(map(repr, ALIGNMENTS))}")
    if problems:
        raise SpecError(*problems)
    band = Band(None if left == -1 else left, None if right == -1 else right)
    return Mask(bottom_right=band) if align == "bottom-right" else Mask(top_left=band)
