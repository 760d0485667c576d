"""A captured tensor without a value: what a spec file says of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Declared:
    """Element type and rank, where a tensor would be; the value comes with a call."""

    dtype: str
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Unknown sizes."""
        return (0,) * self.rank
