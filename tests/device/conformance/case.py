"""A case: one launch of one kernel, with everything that goes into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
#: What two results disagree about, in a sentence; None when they agree.
Agreement: TypeAlias = Callable[["Case", str, Array, Array], "str | None"]


def same_bits(case: Case, name: str, gpu: Array, emulated: Array) -> str | None:
    """Every byte is the same."""
    return report(name, gpu, emulated, gpu.view(np.uint8) != emulated.view(np.uint8))


def same_numbers(case: Case, name: str, gpu: Array, emulated: Array) -> str | None:
    """Every bit is the same, but one NaN is as good as another."""
    either_nan = np.isnan(gpu) & np.isnan(emulated)
    bits = f"u{gpu.itemsize}"
    return report(name, gpu, emulated, (gpu.view(bits) != emulated.view(bits)) & ~either_nan)


def report(name: str, gpu: Array, emulated: Array, wrong: Array) -> str | None:
    """How many elements are ``wrong``, and the first of them."""
    if not wrong.any():
        return None
    first = np.flatnonzero(wrong)[0]
    if wrong.size != gpu.size:
        gpu, emulated = gpu.view(np.uint8), emulated.view(np.uint8)
    where = tuple(int(i) for i in np.unravel_index(first, gpu.shape))
    return (
        f"{name}: {np.count_nonzero(wrong)} of {wrong.size} differ, the first at {where}: "
        f"{gpu.flat[first]!r} on the GPU, {emulated.flat[first]!r} on the emulator"
    )


@dataclass(frozen=True)
class Case:
    """One launch. ``inputs`` and ``outputs`` are named like the fields of the kernel's ``Params``."""

    #: Stem of the file in ``kernels/``.
    kernel: str
    #: Which of the kernel's cases; file names it in reports.
    label: str
    #: A C++ expression: a value of the kernel's type ``Variant``.
    variant: str
    #: Arrays, 32-bit integers and tensor maps.
    inputs: Mapping[str, Any] = field(default_factory=dict)
    #: What these arrays hold before the launch; what they hold afterwards is the answer.
    outputs: Mapping[str, Array] = field(default_factory=dict)
    grid: tuple[int, int, int] = (1, 1, 1)
    threads: int = 32
    smem_bytes: int = 0
    #: Blocks per cluster along x; 0 is a launch without clusters.
    cluster: int = 0
    #: All blocks run at the same time.
    cooperative: bool = False
    #: How often in a row; later ones may start before the one before them ends.
    launches: int = 1
    agreement: Agreement = same_bits

    @property
    def name(self) -> str:
        """Unique among all cases."""
        return f"{self.kernel}/{self.label}"

    def disagreements(self, gpu: Mapping[str, Array], emulated: Mapping[str, Array]) -> list[str]:
        """What the two answers disagree about, a sentence for each output; empty when they agree."""
        found = [self.agreement(self, name, gpu[name], emulated[name]) for name in self.outputs]
        return [sentence for sentence in found if sentence]
