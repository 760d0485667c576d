"""flashgen: a compiler from a Python spec of an attention kernel to CUDA C++ that can be read.

Public names load on first use, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.lazy import lazy_names

if TYPE_CHECKING:
    from flashgen import cache, compile, emulator, errors, oracle, plan, render, spec
    from flashgen.api import Kernel, build
    from flashgen.compat.flash_attn import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
    )
    from flashgen.errors import (
        ArgumentError,
        CacheError,
        CompileError,
        EmulationError,
        FlashgenError,
        LaunchError,
        NoGpuError,
        PlanError,
        SpecError,
    )
    from flashgen.spec import (
        AttentionSpec,
        BackwardSchedule,
        Mask,
        Schedule,
        WarpPartition,
        causal,
        full,
        window,
    )
    from flashgen.torch import attention
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "flashgen.api": ("Kernel", "build"),
            "flashgen.compat.flash_attn": (
                "flash_attn_func",
                "flash_attn_kvpacked_func",
                "flash_attn_qkvpacked_func",
            ),
            "flashgen.errors": (
                "ArgumentError",
                "CacheError",
                "CompileError",
                "EmulationError",
                "FlashgenError",
                "LaunchError",
                "NoGpuError",
                "PlanError",
                "SpecError",
            ),
            "flashgen.spec": (
                "AttentionSpec",
                "BackwardSchedule",
                "Mask",
                "Schedule",
                "WarpPartition",
                "causal",
                "full",
                "window",
            ),
            "flashgen.torch": ("attention",),
        },
        modules=("cache", "compile", "emulator", "errors", "oracle", "plan", "render", "spec"),
    )

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AttentionSpec",
    "BackwardSchedule",
    "CacheError",
    "CompileError",
    "EmulationError",
    "FlashgenError",
    "Kernel",
    "LaunchError",
    "Mask",
    "NoGpuError",
    "PlanError",
    "Schedule",
    "SpecError",
    "WarpPartition",
    "__version__",
    "attention",
    "build",
    "cache",
    "causal",
    "compile",
    "emulator",
    "errors",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "full",
    "oracle",
    "plan",
    "render",
    "spec",
    "window",
]
