"""A change that lasts until it is taken back: by ``remove()``, or at the end of a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Switch:
    """What a function that changes how torch behaves returns; the change is made already."""

    def __init__(self, take_back: Callable[[], None]) -> None:
        self._take_back: Callable[[], None] | None = take_back

    def remove(self) -> None:
        """Takes the change back; a second time does nothing."""
        take_back, self._take_back = self._take_back, None
        if take_back is not None:
            take_back()

    def __enter__(self) -> Switch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
