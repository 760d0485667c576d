"""``Dropout``: what a call of a kernel with ``AttentionSpec(dropout=True)`` says of the pairs it drops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flashgen.common.checks import as_float, is_whole
from flashgen.common.show import show
from flashgen.errors import ArgumentError

#: A pair's number has so many bits, so probabilities are rounded to multiples of 2^-15.
NUMBER_BITS = 15
_WORDS = 1 << 64


@dataclass(frozen=True, slots=True, eq=False)
class Dropout:
    """Drop each pair of a query and a key with probability ``p``; kept pairs count 1 / (1 - p) times.

    The pattern is a function of seed, offset, sequence, head, query and key alone. It is the same for every
    schedule and GPU, and in the backward pass. ``state`` is an array of two 64-bit integers, a seed and an offset,
    on q's device. It replaces the other two arguments, and the kernel reads it when it runs.
    """

    p: float
    seed: int = 0
    offset: int = 0
    state: Any = None

    def __post_init__(self) -> None:
        problems = []
        p = as_float(self.p)
        if p is None or not 0.0 <= p < 1.0:
            problems.append(f"p={show(self.p)} is no probability to drop a pair with; use a number from 0 to below 1")
        for name in ("seed", "offset"):
            value = getattr(self, name)
            if not is_whole(value, 0, _WORDS - 1):
                problems.append(f"{name}={show(value)} is out of range; use a whole number from 0 to below 2^64")
        if not problems and self.state is not None and (self.seed or self.offset):
            both = f"seed={show(self.seed)} and offset={show(self.offset)}"
            problems.append(f"{both} are in state too; leave one of them out")
        if problems:
            raise ArgumentError("\n".join(f"dropout: {problem}" for problem in problems))

    @property
    def dropped_below(self) -> int:
        """Pairs whose number is below this are dropped."""
        return math.floor(self.p * float(2**NUMBER_BITS) + 0.5)

    @property
    def factor(self) -> float:
        """How often a pair that is kept counts."""
        return 1.0 / (1.0 - self.p)
