"""The counters of persistent kernels: words of device memory, 0 between launches, that one launch uses at a time.

Launches on one stream follow each other, so they share a counter: one that starts before the last has ended waits for
it before it looks there. What is captured into a graph may be replayed beside anything, so each captured launch has a
counter to itself, for good.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from flashgen.errors import LaunchError

if TYPE_CHECKING:
    from flashgen.launch.driver.cuda import CudaDriver

COUNTER_WORD_BYTES = 4
#: Counters lie in different sectors, so that kernels that run side by side do not wait for each other's.
_APART = 32
#: How many a device has at first. A graph takes one for each of its launches.
_FIRST = 16384
#: Kernels with wider counters take more memory for each of their launches in a graph, so fewer are made at first.
_FIRST_BYTES = 2**23

_LEGACY, _PER_THREAD = 0, 2


class _OfThread(threading.local):
    """The counters of the calling thread's own default stream."""

    def __init__(self) -> None:
        self.by_stream: dict[int, int] = {}


class Counters:
    """The counters of one size of one device; made in its context, outside of any capture."""

    def __init__(self, driver: CudaDriver, device: int, words: int = 2) -> None:
        self._driver = driver
        self._apart = -(-words * COUNTER_WORD_BYTES // _APART) * _APART
        self._device = device
        self._by_stream: dict[int, int] = {}
        self._of_thread = _OfThread()
        self._lock = threading.Lock()
        self._spare: list[range] = []
        self._made = 0
        #: Whether so many are in use that the next launch outside of a capture has to make more.
        self._is_low = False
        # In this mode of cuda.bindings each thread has a default stream of its own too.
        by_thread = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM" in os.environ
        self._thread_streams = frozenset((_LEGACY, _PER_THREAD) if by_thread else (_PER_THREAD,))
        #: The one stream that nothing can capture, so that most programs' launches need not ask.
        self._never_captured = frozenset(() if by_thread else (_LEGACY,))
        self._grow()

    def address(self, stream: int) -> int:
        """The counter for a launch on the stream, in the device's context."""
        if stream not in self._never_captured and self._driver.is_capturing(stream):
            return self._own()
        known = self._of_thread.by_stream if stream in self._thread_streams else self._by_stream
        counter = known.get(stream)
        if counter is None or self._is_low:
            return self._shared(known, stream)
        return counter

    def _own(self) -> int:
        """A counter that no other launch will ever use."""
        with self._lock:
            if not self._spare:
                raise LaunchError(
                    f"a CUDA graph is being captured, and all {self._made} counters on cuda:{self._device} are in use, "
                    "one for each launch captured so far; call the kernel once outside of the capture, which makes "
                    "as many more, and capture again"
                )
            return self._take()

    def _shared(self, known: dict[int, int], stream: int) -> int:
        """The counter of a stream's launches; also sees to it that captures find enough."""
        with self._lock:
            if self._is_low:
                self._try_to_grow()
            if stream not in known:
                if not self._spare:
                    self._grow()
                known[stream] = self._take()
            return known[stream]

    def _take(self) -> int:
        first = self._spare[0]
        self._spare[0] = first[1:]
        if not self._spare[0]:
            del self._spare[0]
        self._is_low = 2 * sum(map(len, self._spare)) < self._made
        return first[0]

    def _try_to_grow(self) -> None:
        """Where there is no memory this launch may do without; the next one that takes a counter tries again."""
        try:
            self._grow()
        except LaunchError:
            self._is_low = False

    def _grow(self) -> None:
        """Makes as many more as there are, so that whoever captures ever more comes to an end."""
        count = self._made or min(_FIRST, max(1, _FIRST_BYTES // self._apart))
        start = self._driver.allocate_zeroed(count * self._apart)
        self._spare.append(range(start, start + count * self._apart, self._apart))
        self._made += count
        self._is_low = False


_counters: dict[tuple[int, int, int], Counters] = {}
_lock = threading.Lock()


def counters_of(driver: CudaDriver, device: int, words: int = 2) -> Counters:
    """The counters of so many words that kernels share on a device, whose context must be current."""
    # They hold on to the driver, so nothing else gets its id.
    key = id(driver), device, words
    with _lock:
        if key not in _counters:
            _counters[key] = Counters(driver, device, words)
        return _counters[key]
