"""What NVRTC compiles: a kernel with a few of its variants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from conformance.case import Case
from conformance.source import symbol, unit
from flashgen.compile import nvrtc, options_for
from flashgen.compile.resources import serialisation_warnings
from flashgen.errors import CompileError

ARCH = "sm_90a"
#: Variants per compilation: few enough to share the work among processes.
_VARIANTS = 8


class Unit(NamedTuple):
    """One compilation."""

    kernel: str
    variants: tuple[str, ...]

    @property
    def text(self) -> str:
        """What is compiled."""
        return unit(self.kernel, self.variants)

    def split(self) -> list[Unit]:
        """A unit for each variant, to find the ones at fault."""
        return [Unit(self.kernel, (variant,)) for variant in self.variants]


def units_of(cases: Iterable[Case]) -> list[Unit]:
    """The compilations that the cases need."""
    by_kernel: dict[str, dict[str, None]] = {}
    for case in cases:
        by_kernel.setdefault(case.kernel, {})[case.variant] = None
    return [
        Unit(kernel, tuple(variants)[start : start + _VARIANTS])
        for kernel, variants in by_kernel.items()
        for start in range(0, len(variants), _VARIANTS)
    ]


def compile_unit(what: Unit, arch: str = ARCH) -> bytes:
    """The cubin; CompileError with the compiler's words otherwise."""
    name = symbol(what.kernel)
    result = nvrtc.run(what.text, f"{name}.cu", options_for(arch))
    if not result.succeeded:
        raise CompileError(f"{name} with {', '.join(what.variants)} does not compile", result.log)
    if serialised := serialisation_warnings(result.log):
        raise CompileError(f"the wgmma instructions of {name} wait for each other", "\n".join(serialised))
    return result.cubin
