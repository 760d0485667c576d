"""Makes the kernels of a plan: rendered, then compiled or found in a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Literal, TypeVar

from flashgen.errors import RegistersError
from flashgen.launch.variant import Loadable, Variant
from flashgen.plan.fallbacks import fallbacks
from flashgen.plan.model.plans import AttentionPlan

if TYPE_CHECKING:
    from flashgen.cache import Cache
    from flashgen.compile.binary import Binary
    from flashgen.render import KernelSource

TargetName = Literal["gpu", "emulator"]

Made = TypeVar("Made")


def make_variant(attention: AttentionPlan, target: TargetName) -> Variant:
    """All kernels of a plan, or of the first fallback that has enough registers."""
    if target == "emulator":
        from flashgen.sources import sources_of

        return Variant(attention, {role: Loadable(s.plan, s) for role, s in sources_of(attention).items()})
    return with_registers(attention, _compiled)


def with_registers(
    attention: AttentionPlan,
    compiled: Callable[[AttentionPlan], Made],
    refused: Callable[[AttentionPlan], None] = lambda attention: None,
) -> Made:
    """What ``compiled`` makes of the plan, or of the first fallback that has enough registers.

    ``refused`` hears of each plan that has too few, except the last.
    """
    left = fallbacks(attention)
    while True:
        try:
            return compiled(attention)
        except RegistersError:
            fallback = next(left, None)
            if fallback is None:
                raise
        refused(attention)
        attention = fallback


def _compiled(attention: AttentionPlan) -> Variant:
    """The kernels with their binaries, from the cache where it has them."""
    from flashgen.cache import default_cache
    from flashgen.compile import asked_meanwhile
    from flashgen.sources import sources_of

    cache = default_cache()
    sources = sources_of(attention, asked_meanwhile)
    loadables = {}
    # Not every caller wants gradients of what was captured, and nobody wants to wait for them without need.
    with _others_ahead(cache, [source for source in sources.values() if source.plan.captured is None]):
        for role, source in sources.items():
            compiled, renew = partial(_binary, cache, source), partial(_renewed, cache, source)
            if source.plan.captured is None:
                loadables[role] = Loadable(source.plan, source, compiled(), renew=renew)
            else:
                loadables[role] = Loadable(source.plan, source, compile=compiled, renew=renew)
    return Variant(attention, loadables)


@contextmanager
def _others_ahead(cache: Cache, sources: list[KernelSource]) -> Iterator[None]:
    """Around the compiling of these in their order: threads compile the last ones meanwhile, if processors are free.

    What goes wrong there is not for them to say: the cache then has no binary, and whoever asks for it gets the error.
    """
    left = [source for source in sources if not cache.holds(source)]
    threads: list[Thread] = []

    def compile_last() -> None:
        while left:
            # Another thread may have been quicker.
            with suppress(Exception):
                _binary(cache, left.pop())

    try:
        for _ in range(min(len(left), _processors()) - 1):
            thread = Thread(target=compile_last, name="flashgen compiles ahead")
            # Without one the kernels are compiled one after another.
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


def binary_of(source: KernelSource) -> Binary:
    """A kernel compiled for its GPU, from the cache where it has it."""
    from flashgen.cache import default_cache

    return _binary(default_cache(), source)


def _binary(cache: Cache, source: KernelSource) -> Binary:
    binary, _ = cache.get_or_compile(source, _compile)
    return binary


def _renewed(cache: Cache, source: KernelSource) -> Binary:
    """The binary compiled again: an entry can be whole and yet be none that this driver loads."""
    cache.discard_source(source)
    return _binary(cache, source)


def _compile(source: KernelSource) -> Binary:
    from flashgen.compile import compile_source

    return compile_source(source)
