"""The path from a spec to kernels, on one page.

    spec ──► plan ──► source ──► binary ──► Kernel
        plans   sources   binaries    variant

``plans`` decides everything. If the assembler has too few registers, ``variant`` goes on to the plan's next fallback.
A variant holds all kernels for one alignment of the arguments. ``Kernel`` calls them, and gets another variant for
less aligned arguments. ``api.build``, the command line, torch and the tests all take this path.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from flashgen.arch import Arch
from flashgen.cache import default_cache
from flashgen.cache.ahead import compiling_ahead
from flashgen.errors import RegistersError
from flashgen.launch.variant import Loadable, Variant
from flashgen.plan import plan
from flashgen.plan.fallbacks import fallbacks as fallbacks
from flashgen.plan.model.plans import AttentionPlan, Role
from flashgen.render.override import unused_overrides
from flashgen.sources import sources_of
from flashgen.spec import AttentionSpec, Schedule
from flashgen.tuned import recall

if TYPE_CHECKING:
    from flashgen.compile.binary import Binary
    from flashgen.render import KernelSource

TargetName = Literal["gpu", "emulator"]
Built = TypeVar("Built")


class Observer:
    """Follows a build. This one is for libraries: it warns about unused overrides and says nothing else."""

    def unused_overrides(self, message: str) -> None:
        """No plan has a kernel that FLASHGEN_OVERRIDE_DIR replaces."""
        # Only a warning, because a process may build other specs as well. It names the caller of ``api.build``.
        warnings.warn(message, stacklevel=4)

    def tuned(self, message: str) -> None:
        """A tuned schedule takes the place of the plan's own."""
        # On use, as nearly no build needs it.
        import logging

        logging.getLogger("flashgen").info(message)

    def compiling(self, source: KernelSource) -> AbstractContextManager[object]:
        """The build needs a binary that the cache lacks; the context lasts until the binary is there."""
        return nullcontext()

    def compiled(self, source: KernelSource) -> None:
        """The compiler has made a binary. Any thread may call this."""

    def refused(self, attention: AttentionPlan) -> None:
        """A plan has too few registers, and the build goes on with its next fallback."""


QUIET = Observer()


def plans(
    spec: AttentionSpec,
    schedule: Schedule | None,
    archs: Iterable[Arch],
    observer: Observer = QUIET,
    *,
    gpu: Callable[[], str] | None = None,
) -> tuple[AttentionPlan, ...]:
    """Spec to plan: one for each architecture, for arguments aligned as contiguous arrays are.

    ``gpu`` tells the name of the GPU that they are for. If a schedule was tuned there and none is given, it is used.
    """
    tuning = recall(spec, gpu) if schedule is None and gpu is not None else None
    if tuning is None:
        found = tuple(plan(spec, schedule, arch) for arch in archs)
    else:
        found = tuple(replace(plan(spec, tuning.schedule, arch), tuning=tuning) for arch in archs)
        observer.tuned(tuning.headline)
    if message := unused_overrides(found, (other for one in found for other in fallbacks(one))):
        observer.unused_overrides(message)
    return found


def sources(attention: AttentionPlan, target: TargetName = "gpu") -> dict[Role, KernelSource]:
    """Plan to source: each kernel's CUDA C++, from the cache or rendered."""
    if target == "emulator":
        return sources_of(attention)
    from flashgen.compile import asked_meanwhile

    # The cache key of a binary names the compiler, which takes a while to tell.
    return sources_of(attention, asked_meanwhile)


def binaries(texts: Mapping[Role, KernelSource], observer: Observer = QUIET) -> dict[Role, Binary]:
    """Source to binary: each kernel's cubin, from the cache or compiled, several at a time."""
    cache, compiler = default_cache(), partial(_compile, observer=observer)
    missing = {role: text for role, text in texts.items() if not cache.holds(text)}

    def binary(role: Role, text: KernelSource) -> Binary:
        with observer.compiling(text) if role in missing else nullcontext():
            return cache.get_or_compile(text, compiler)[0]

    with compiling_ahead(cache, list(missing.values()), compiler):
        return {role: binary(role, text) for role, text in texts.items()}


def kept(texts: Mapping[Role, KernelSource]) -> dict[Role, Binary]:
    """The binaries of those sources that the cache holds; this compiles nothing."""
    cache = default_cache()
    return binaries({role: text for role, text in texts.items() if cache.holds(text)})


def variant(attention: AttentionPlan, target: TargetName = "gpu", observer: Observer = QUIET) -> Variant:
    """Plan to kernels that can be loaded: the plan's, or those of its first fallback with enough registers."""
    if target == "emulator":
        texts = sources(attention, target)
        return Variant(attention, {role: Loadable(text.plan, text) for role, text in texts.items()})
    return with_enough_registers(attention, partial(_compiled, observer=observer), observer)


def candidates(attention: AttentionPlan) -> tuple[AttentionPlan, ...]:
    """The plan, and its fallbacks in the order in which a build tries them."""
    return attention, *fallbacks(attention)


def with_enough_registers(
    attention: AttentionPlan, build: Callable[[AttentionPlan], Built], observer: Observer = QUIET
) -> Built:
    """What ``build`` makes of a plan, or of its first fallback that the assembler does not refuse."""
    left = fallbacks(attention)
    while True:
        try:
            return build(attention)
        except RegistersError:
            fallback = next(left, None)
            if fallback is None:
                raise
        observer.refused(attention)
        attention = fallback


def _compiled(attention: AttentionPlan, observer: Observer) -> Variant:
    """The kernels of this very plan. Those for gradients of captured tensors, which few calls need, compile later."""
    texts = sources(attention)
    found = binaries({role: text for role, text in texts.items() if text.plan.captured is None}, observer)

    def loadable(role: Role, text: KernelSource) -> Loadable:
        later = partial(_binary, text, observer) if role not in found else None
        return Loadable(text.plan, text, found.get(role), compile=later, renew=partial(_renewed, text))

    return Variant(attention, {role: loadable(role, text) for role, text in texts.items()})


def _binary(text: KernelSource, observer: Observer = QUIET) -> Binary:
    return binaries({text.plan.role: text}, observer)[text.plan.role]


def _renewed(text: KernelSource) -> Binary:
    """The binary compiled again: a driver may refuse an entry of the cache that is whole."""
    default_cache().discard_source(text)
    return _binary(text)


def _compile(text: KernelSource, observer: Observer) -> Binary:
    # Imported here: a build whose binaries are all in the cache loads no compiler.
    from flashgen.compile import compile_source

    made = compile_source(text)
    observer.compiled(text)
    return made
