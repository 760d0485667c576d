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
        TraceError,
    )
    from flashgen.explanation import Explanation, explain
    from flashgen.expr.functions import abs_ as abs
    from flashgen.expr.functions import exp, k_len, log, maximum, minimum, q_len, sigmoid, tanh, where
    from flashgen.spec import (
        AttentionSpec,
        BackwardSchedule,
        Dropout,
        Mask,
        Schedule,
        Score,
        Sequences,
        WarpPartition,
        alibi,
        bias,
        block_sparse,
        causal,
        chunked,
        dilated,
        document,
        full,
        global_tokens,
        key_padding,
        prefix_lm,
        relative_bias,
        sink,
        sliding_window,
        softcap,
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
                "Dropout",
                "EmulationError",
                "FlashgenError",
                "LaunchError",
                "NoGpuError",
                "PlanError",
                "SpecError",
                "TraceError",
            ),
            "flashgen.explanation": ("Explanation", "explain"),
            "flashgen.expr.functions": (
                # A module attribute of that name would hide Python's own inside of the module that defines it.
                "abs_ as abs",
                "exp",
                "k_len",
                "log",
                "maximum",
                "minimum",
                "q_len",
                "sigmoid",
                "tanh",
                "where",
            ),
            "flashgen.spec": (
                "AttentionSpec",
                "BackwardSchedule",
                "Dropout",
                "Mask",
                "Schedule",
                "Score",
                "Sequences",
                "WarpPartition",
                "alibi",
                "bias",
                "block_sparse",
                "causal",
                "chunked",
                "dilated",
                "document",
                "full",
                "global_tokens",
                "key_padding",
                "prefix_lm",
                "relative_bias",
                "sink",
                "sliding_window",
                "softcap",
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
    "Dropout",
    "EmulationError",
    "Explanation",
    "FlashgenError",
    "Kernel",
    "LaunchError",
    "Mask",
    "NoGpuError",
    "PlanError",
    "Schedule",
    "Score",
    "Sequences",
    "SpecError",
    "TraceError",
    "WarpPartition",
    "__version__",
    "abs",
    "alibi",
    "attention",
    "bias",
    "block_sparse",
    "build",
    "cache",
    "causal",
    "chunked",
    "compile",
    "dilated",
    "document",
    "emulator",
    "errors",
    "exp",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "full",
    "global_tokens",
    "k_len",
    "key_padding",
    "log",
    "maximum",
    "minimum",
    "oracle",
    "plan",
    "prefix_lm",
    "q_len",
    "relative_bias",
    "render",
    "sigmoid",
    "sink",
    "sliding_window",
    "softcap",
    "spec",
    "tanh",
    "where",
    "window",
]
