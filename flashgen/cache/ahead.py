"""Compiles several sources in parallel into a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.cache.cache import Cache
    from flashgen.compile.binary import Binary
    from flashgen.render import KernelSource


@contextmanager
def compiling_ahead(
    cache: Cache, sources: Sequence[KernelSource], compile_source: Callable[[KernelSource], Binary]
) -> Iterator[None]:
    """Threads compile these sources from the last one on, while the caller compiles them from the first one on.

    Threads ignore errors. The caller gets the same error when it compiles that source.
    """
    left = list(sources)
    threads: list[Thread] = []

    def compile_last() -> None:
        while left:
            # Another thread may have taken the last one, and errors are for the caller.
            with suppress(Exception):
                cache.get_or_compile(left.pop(), compile_source)

    try:
        for _ in range(min(len(left), _processors()) - 1):
            thread = Thread(target=compile_last, name="flashgen compiles ahead")
            # If no thread can start, the caller compiles everything.
            with suppress(RuntimeError):
                thread.start()
                threads.append(thread)
        yield
    finally:
        # Wait even after an error: in a process that forks while a thread compiles, the compiler stays locked.
        left.clear()
        for thread in threads:
            thread.join()


def _processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
