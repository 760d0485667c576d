"""What a forked child must let go of: locks whose holders do not exist in it, and descriptors it shares."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class ForkAware(Protocol):
    """An object with state that must not cross a fork."""

    def after_fork_in_child(self) -> None:
        """Drop locks, waiters and shared descriptors."""


_protected: WeakSet[ForkAware] = WeakSet()
_registered = False


def protect(thing: ForkAware) -> None:
    """Call ``thing.after_fork_in_child()`` in every child that this process forks."""
    global _registered
    _protected.add(thing)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_reset)


def _reset() -> None:
    for thing in list(_protected):
        thing.after_fork_in_child()
