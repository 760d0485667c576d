"""``AttentionSpec``: what a kernel computes, with no word about hardware."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from flashgen.dtypes import ALIASES, DTYPES, DType
from flashgen.errors import SpecError
from flashgen.spec.mask import Mask, full
from flashgen.spec.show import show

MAX_HEAD_DIM = 256
Direction = Literal["forward", "both"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Softmax attention over queries, keys and values of given head dimensions, dtype and mask.

    ``head_dim_v`` defaults to ``head_dim``. ``direction="forward"`` leaves the backward pass out.
    ``deterministic=True`` makes the backward pass bitwise reproducible (the forward always is).
    """

    head_dim: int
    head_dim_v: int = field(default=0, kw_only=True)
    dtype: str = field(default="bf16", kw_only=True)
    mask: Mask = field(default_factory=full, kw_only=True)
    direction: Direction = field(default="both", kw_only=True)
    deterministic: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if type(self.head_dim_v) is int and self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if isinstance(self.dtype, str) and self.dtype.lower() in ALIASES:
            object.__setattr__(self, "dtype", ALIASES[self.dtype.lower()].name)
        problems = list(self._violations())
        if problems:
            raise SpecError(*problems)

    def _violations(self) -> Iterator[str]:
        same = self.head_dim_v is self.head_dim  # left out: one sentence says it
        for name in ("head_dim",) if same else ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_HEAD_DIM:
                yield f"{name}={show(value)} is out of range; use a whole number from 1 to {MAX_HEAD_DIM}"
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            yield f"dtype={show(self.dtype)} is unknown; use one of {', '.join(DTYPES)}"
        if not isinstance(self.mask, Mask):
            yield (
                f"mask={show(self.mask)} is not a mask; "
                "use flashgen.causal(), flashgen.window(left, right) or flashgen.full()"
            )
        if self.direction not in ("forward", "both"):
            yield f"direction={show(self.direction)} is unknown; use 'forward' or 'both'"
        if not isinstance(self.deterministic, bool):
            yield f"deterministic={show(self.deterministic)} is not a bool; use True or False"

    @property
    def element(self) -> DType:
        """The row of the dtype table."""
        return DTYPES[self.dtype]

    @property
    def default_scale(self) -> float:
        """1 / sqrt(head_dim), the factor on scores when a call names none."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def needs_backward(self) -> bool:
        """Whether the backward pass is part of the spec."""
        return self.direction == "both"

    def describe(self) -> str:
        """One line for people."""
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        extras = [] if self.needs_backward else ["forward only"]
        extras += ["deterministic"] if self.deterministic else []
        return ", ".join([f"head_dim {dims}", self.dtype, self.mask.describe(), *extras])
