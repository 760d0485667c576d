"""From source text to a cubin, with NVRTC: no CUDA toolkit, no GPU and no driver needed.

NVRTC is loaded by the first call that compiles, and each name's module by its first use: a build from a
warm cache compiles nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.common.lazy import lazy_names

if TYPE_CHECKING:
    from flashgen.compile.binary import Binary, Resources
    from flashgen.compile.build_id import asked_meanwhile, compiler_build_id
    from flashgen.compile.compiler import compile_ptx, compile_source, compile_text
    from flashgen.compile.disassembler import disassemble, find_disassembler
    from flashgen.compile.locate import find_nvrtc
    from flashgen.compile.options import options_for
    from flashgen.compile.registers import require_registers
    from flashgen.compile.residency import Occupancy, blocks_per_multiprocessor, occupancy
    from flashgen.compile.spills import spill_warning
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "flashgen.compile.binary": ("Binary", "Resources"),
            "flashgen.compile.build_id": ("asked_meanwhile", "compiler_build_id"),
            "flashgen.compile.compiler": ("compile_ptx", "compile_source", "compile_text"),
            "flashgen.compile.disassembler": ("disassemble", "find_disassembler"),
            "flashgen.compile.locate": ("find_nvrtc",),
            "flashgen.compile.options": ("options_for",),
            "flashgen.compile.registers": ("require_registers",),
            "flashgen.compile.residency": ("Occupancy", "blocks_per_multiprocessor", "occupancy"),
            "flashgen.compile.spills": ("spill_warning",),
        },
    )

__all__ = [
    "Binary",
    "Occupancy",
    "Resources",
    "asked_meanwhile",
    "blocks_per_multiprocessor",
    "compile_ptx",
    "compile_source",
    "compile_text",
    "compiler_build_id",
    "disassemble",
    "find_disassembler",
    "find_nvrtc",
    "occupancy",
    "options_for",
    "require_registers",
    "spill_warning",
]
