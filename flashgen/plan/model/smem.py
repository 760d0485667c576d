"""Laying out shared memory: regions one after another, and later phases over earlier ones."""

from __future__ import annotations

from flashgen.plan.model.parts import SmemMap, SmemRegion

#: Tiles begin at multiples of this, so that a swizzled address is its tile's base with a few bits flipped.
ALIGNMENT = 128


class SmemLayout:
    """Collects regions; ``then`` appends one, ``over`` lets one reuse the space from the start."""

    def __init__(self) -> None:
        self._regions: list[SmemRegion] = []
        self._end = 0

    def then(self, name: str, size: int, note: str = "", alignment: int = ALIGNMENT) -> SmemLayout:
        """A region after all others of its phase."""
        start = -(-self._end // alignment) * alignment
        self._regions.append(SmemRegion(name, start, size, note))
        self._end = start + size
        return self

    def over(self, name: str, size: int, note: str = "") -> SmemLayout:
        """A region of a later phase, at the start, where nothing is needed any more."""
        self._regions.append(SmemRegion(name, 0, size, note))
        return self

    def map(self) -> SmemMap:
        """The finished map."""
        return SmemMap(tuple(self._regions))
