"""Makes the kernels of a spec for one alignment of their arguments: planned, rendered, compiled or found in a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from flashgen.arch import Arch
from flashgen.errors import RegistersError
from flashgen.launch.variant import Loadable, Variant
from flashgen.plan.model import AttentionPlan
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
    loadables = {}
    for role, source in sources_of(attention, asked_meanwhile).items():
        compiled, renew = partial(_binary, cache, source), partial(_renewed, cache, source)
        if source.plan.captured is None:
            loadables[role] = Loadable(source.plan, source, compiled(), renew=renew)
        else:
            # Not every caller wants these gradients, and nobody wants to wait for them without need.
            loadables[role] = Loadable(source.plan, source, compile=compiled, renew=renew)
    return Variant(attention, loadables)


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
