"""What a compiler makes of a source: the cubin, and what it takes of a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: What most images are; the others are "sources" and "library".
DEFAULT_KIND: Final = "cubin"


class Resources(NamedTuple):
    """What one kernel takes, as the assembler reports it."""

    #: Per thread.
    registers: int
    #: Bytes written to plus bytes read back from local memory by spilled registers, in the code, per thread.
    spill_bytes: int
    #: Local memory per thread: spills and arrays that could not stay in registers.
    stack_bytes: int
    #: Shared memory that the kernel declares itself, without what the launch asks for.
    static_smem_bytes: int

    def __str__(self) -> str:
        spills = f"{self.spill_bytes} spill bytes" if self.spill_bytes else "no spills"
        return f"{self.registers} registers, {spills}"


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel, or what else is made of a plan once and kept: its sources, a library of the emulator."""

    name: str
    #: Full name, such as ``sm_90a``; of the emulator's libraries the processor's, such as ``x86_64``.
    arch: str
    #: What ``kind`` says.
    image: bytes = field(repr=False)
    resources: Resources
    compile_seconds: float
    #: What the compiler said: warnings and the resource report.
    log: str = field(repr=False)
    kind: str = DEFAULT_KIND
