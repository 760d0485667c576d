"""Compiles several sources at a time into a cache, if processors are free."""

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
    """While the caller compiles these sources in their order, threads compile the last ones first.

    Threads report no error: the cache then has no binary, and the caller meets the error when it gets there.
    """
    left = list(sources)
    threads: list[Thread] = []

    def compile_last() -> None:
        while left:
            # Another thread may have been quicker.
            with suppress(Exception):
                cache.get_or_compile(left.pop(), compile_source)

    try:
        for _ in range(min(len(left), _processors()) - 1):
            thread = Thread(target=compile_last, name="flashgen compiles ahead")
            # Without threads, the caller compiles one kernel after another.
            with suppress(RuntimeError):
                thread.start()
                threads.append(thread)
        yield
    finally:
        # Also after an error: a process forked while a thread is inside the compiler may find it locked.
        left.clear()
        for thread in threads:
            thread.join()


def _processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
