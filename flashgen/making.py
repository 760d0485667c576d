"""Makes the kernels of a spec for one alignment of their arguments: planned, rendered, compiled or found in a cache."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Literal, TypeVar

from flashgen.arch import Arch
from flashgen.errors import RegistersError
from flashgen.launch.variant import Loadable, Variant
from flashgen.plan.model.plans import AttentionPlan
from flashgen.render.override import unused_overrides
from flashgen.spec import AttentionSpec, Schedule

if TYPE_CHECKING:
    from flashgen.cache import Cache
    from flashgen.compile.binary import Binary
    from flashgen.render import KernelSource

TargetName = Literal["gpu", "emulator"]

Made = TypeVar("Made")


def make_variant(
    spec: AttentionSpec,
    schedule: Schedule | None,
    arch: Arch,
    target: TargetName,
    access_bytes: int | None = None,
) -> Variant:
    """All kernels of a spec for arguments aligned to ``access_bytes``, by default as the head dims allow."""
    from flashgen.plan import plan

    attention = plan(spec, schedule, arch, access_bytes=access_bytes)
    # A process may build other specs as well, and kernels for other alignments have other names: only a warning.
    if access_bytes is None and (message := unused_overrides([attention])):
        warnings.warn(message, stacklevel=2)
    if target == "emulator":
        from flashgen.sources import sources_of

        return Variant(attention, {role: Loadable(s.plan, s) for role, s in sources_of(attention).items()})
    return with_registers(attention, _compiled)


def with_registers(
    attention: AttentionPlan,
    compiled: Callable[[AttentionPlan], Made],
    refused: Callable[[AttentionPlan], None] = lambda attention: None,
) -> Made:
    """What is compiled of a plan, or of the first that has enough registers of those that take its place.

    ``refused`` is told of each that has not and is not the last.
    """
    try:
        return compiled(attention)
    except RegistersError as error:
        last = error
    from flashgen.plan import plan
    from flashgen.plan.algorithm import schedules_instead

    access_bytes = attention.kernel("forward").access_bytes
    for schedule in schedules_instead(attention):
        refused(attention)
        attention = plan(attention.spec, schedule, attention.arch, access_bytes=access_bytes)
        try:
            return compiled(attention)
        except RegistersError as error:
            last = error
    raise last


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
