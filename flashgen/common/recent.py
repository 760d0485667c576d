"""A dictionary that forgets what nobody asked for lately."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Values by key: half of ``most`` that were asked for last, and up to ``most`` in all; for many threads.

    They are two generations. What is put in or found in the older one joins the younger one, and when that is full it
    becomes the older one, which is dropped. So what is asked for often is found in one look into a dictionary.
    """

    def __init__(self, most: int) -> None:
        self._half = most // 2
        #: With the key that a value came with: another one that is equal may hold on to more.
        self._young: dict[Key, tuple[Key, Value]] = {}
        self._old: dict[Key, tuple[Key, Value]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._young.keys() | self._old.keys())

    def get(self, key: Key) -> Value | None:
        """The value of a key, unless there is none or it was forgotten."""
        found = self._young.get(key)
        if found is not None:
            return found[1]
        found = self._old.get(key)
        return None if found is None else self.keep(*found)

    def keep(self, key: Key, value: Value) -> Value:
        """The value that is there already, else this one from now on."""
        with self._lock:
            found = self._young.get(key)
            if found is None:
                found = self._old.get(key, (key, value))
                if len(self._young) >= self._half:
                    self._young, self._old = {}, self._young
                self._young[found[0]] = found
            return found[1]

    def forget(self, is_unwanted: Callable[[Key], bool]) -> None:
        """Forgets the values of some keys."""
        with self._lock:
            self._young, self._old = (
                {key: found for key, found in half.items() if not is_unwanted(key)} for half in (self._young, self._old)
            )
