"""The laboratory: instruments that show what attention kernels cost. Nothing in the core imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.common.lazy import lazy_names

if TYPE_CHECKING:
    from flashgen.lab.io.count import IOCount, count_io
    from flashgen.lab.io.model import io_model
    from flashgen.lab.io.result import IOModel
    from flashgen.lab.io.traffic import AlgorithmIO, KernelIO
    from flashgen.lab.memory import Memory, memory
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "flashgen.lab.io.count": ("IOCount", "count_io"),
            "flashgen.lab.io.model": ("io_model",),
            "flashgen.lab.io.result": ("IOModel",),
            "flashgen.lab.io.traffic": ("AlgorithmIO", "KernelIO"),
            "flashgen.lab.memory": ("Memory", "memory"),
        },
    )

__all__ = ["AlgorithmIO", "IOCount", "IOModel", "KernelIO", "Memory", "count_io", "io_model", "memory"]
