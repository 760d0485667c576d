"""Masks: which keys a query may attend to.

Causal masks and windows are *bands* of the score matrix: key ``k`` is allowed for query ``q`` when
``lower <= k - q <= upper``. Bands are closed under ``&``, so any combination of them is again one band, and a
kernel needs only the two numbers, known when the lengths are. Every other mask is an expression over b, h, q
and k (``flashgen.expr``), which may hold captured numbers and tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flashgen.common.checks import is_one_of
from flashgen.common.show import show
from flashgen.errors import SpecError
from flashgen.spec.form import Form, form_of
from flashgen.spec.masks.band import NO_LIMITS, Band, limit_violations
from flashgen.spec.masks.tensor_masks import mask_function, problem_with

if TYPE_CHECKING:
    from flashgen.expr import TileRule, Traced

Align = Literal["bottom-right", "top-left"]
ALIGNMENTS: tuple[Align, ...] = ("bottom-right", "top-left")


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """An intersection of two bands and an expression; masks combine with ``&``, ``|`` and ``~``.

    There is a band for each way of aligning queries with keys when lengths differ: bottom-right puts the last
    query on the last key (as flash-attn does); top-left the first on the first (as SDPA does). With equal
    lengths they are the same. ``rest`` is the condition that bands cannot express.

    Two masks are equal when they allow the same pairs by the same expression; the tensors that it captured are
    arguments of a call, so only their names and types count.
    """

    bottom_right: Band = NO_LIMITS
    top_left: Band = NO_LIMITS
    rest: Traced | None = None
    #: The same object for equal masks, where there is an expression.
    form: Form | None = field(init=False, repr=False, default=None)
    #: The form's name; empty where there is no form.
    form_name: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        if self.rest is not None:
            form = form_of(self._key())
            object.__setattr__(self, "form", form)
            object.__setattr__(self, "form_name", form.name)

    @classmethod
    def of(cls, mask: Any) -> Mask:
        """A mask as it is, or the mask of a function ``(b, h, q, k) -> condition``, or of an array of bools.

        An array is ``(batch, heads, len_q, len_kv)``; leading dimensions may be missing, and any may be 1.
        """
        if isinstance(mask, Mask):
            return mask
        from flashgen.expr import element_type, is_tensor, trace_mask

        if is_tensor(mask):
            problem = problem_with(element_type(mask), mask.shape)
            if problem:
                raise SpecError(problem)
            mask = mask_function(mask)
        return cls(rest=trace_mask(mask))

    def __and__(self, other: Mask) -> Mask:
        _check_is_mask(other, "&")
        rest = self.rest if other.rest is None else other.rest if self.rest is None else self.rest & other.rest
        return Mask(self.bottom_right & other.bottom_right, self.top_left & other.top_left, rest)

    def __or__(self, other: Mask) -> Mask:
        _check_is_mask(other, "|")
        return Mask(rest=self.traced | other.traced)

    def __invert__(self) -> Mask:
        return Mask(rest=~self.traced)

    def _key(self) -> tuple[object, ...]:
        return self.bottom_right, self.top_left, None if self.rest is None else self.rest.key

    def plain(self) -> tuple[object, ...]:
        """The code as text: all but the widths of its bands and the values that its expression captured."""
        rest = None if self.rest is None else self.rest.plain()
        return (*(band.plain() for band in (self.bottom_right, self.top_left)), rest)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Mask) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def is_full(self) -> bool:
        """Whether every query attends to every key."""
        return self.bottom_right.is_full and self.top_left.is_full and self.rest is None

    @property
    def is_band(self) -> bool:
        """Whether two bounds on ``k - q``, the same for all sequences and heads, say everything."""
        return self.rest is None or self.rule.band is not None

    @property
    def has_lower(self) -> bool:
        """Whether the mask is a band with a limit on the left, whatever the lengths."""
        if self.rest is not None:
            return self.rule.band is not None and self.rule.band.lower is not None
        return self.bottom_right.left is not None or self.top_left.left is not None

    @property
    def has_upper(self) -> bool:
        """Whether the mask is a band with a limit on the right, whatever the lengths."""
        if self.rest is not None:
            return self.rule.band is not None and self.rule.band.upper is not None
        return self.bottom_right.right is not None or self.top_left.right is not None

    @property
    def traced(self) -> Traced:
        """The whole mask as one expression."""
        from flashgen.spec.masks.bands import band_expression

        whole = band_expression(self.bottom_right, self.top_left)
        return whole if self.rest is None else self.rest if self.bands_are_full else whole & self.rest

    @property
    def bands_are_full(self) -> bool:
        """Whether the expression alone is the mask."""
        return self.bottom_right.is_full and self.top_left.is_full

    @property
    def rule(self) -> TileRule:
        """Which tiles hold allowed pairs, derived from the expression."""
        from flashgen.spec.masks.bands import rule_of

        return rule_of(self.traced.root)

    def diagonals(self, len_q: int, len_kv: int) -> tuple[int, int]:
        """The band as bounds on ``k - q`` for these lengths, clipped to what can occur.

        A mask that is no band has no bounds.
        """
        lower, upper = -len_q, len_kv
        if self.rest is not None:
            from flashgen.spec.masks.bands import band_bounds

            lower, upper = band_bounds(self.rule, self.traced.scalars, len_q, len_kv)
            return max(lower, -len_q), max(-len_q - 1, min(upper, len_kv))
        for band, shift in ((self.bottom_right, len_kv - len_q), (self.top_left, 0)):
            if band.left is not None:
                lower = max(lower, shift - band.left)
            if band.right is not None:
                upper = min(upper, shift + band.right)
        return max(lower, -len_q), max(-len_q - 1, min(upper, len_kv))

    def describe(self) -> str:
        """The mask as text: ``full``, ``causal``, ``window(left=512, right=0)`` ..."""
        parts = [
            _describe_band(band, align)
            for band, align in ((self.bottom_right, "bottom-right"), (self.top_left, "top-left"))
            if not band.is_full
        ]
        if self.rest is not None:
            from flashgen.expr import text

            parts.append(f"({text(self.rest.root)})" if parts else text(self.rest.root))
        return " & ".join(parts) if parts else "full"


def _check_is_mask(value: object, op: str) -> None:
    if not isinstance(value, Mask):
        raise SpecError(f"`{op}` combines masks, and {show(value)} is none; use Mask.of(function), or a named mask")


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
    problems = limit_violations(left, right, smallest=-1)
    if not is_one_of(align, ALIGNMENTS):
        problems.append(f"align={show(align)} is unknown; use one of {', '.join(map(repr, ALIGNMENTS))}")
    if problems:
        raise SpecError(*problems)
    band = Band(None if left == -1 else left, None if right == -1 else right)
    return Mask(bottom_right=band) if align == "bottom-right" else Mask(top_left=band)
