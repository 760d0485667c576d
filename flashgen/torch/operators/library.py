"""The library ``torch.ops.flashgen``, and what its attention operators have in common."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.torch.tensors import autocast

library = torch.library.Library("flashgen", "DEF")

_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCPU
)


def arguments_by_name(operator: str, given: Any, named: Any = None) -> dict[str, Any]:
    """All arguments of a call. torch leaves trailing ones out that have their default."""
    parameters = getattr(torch.ops.flashgen, operator).default._schema.arguments
    defaults = {x.name: x.default_value for x in parameters if x.has_default_value()}
    return defaults | dict(zip([x.name for x in parameters], given, strict=False)) | (named or {})


def implement(operator: str, function: Any) -> None:
    """Makes a function the operator's kernel on both devices: on the CPU, its errors say what to do."""
    for device in ("CUDA", "CPU"):
        library.impl(operator, function, device)


def register_autocast(operator: str) -> None:
    """Has an operator that starts with q, k and v cast them under autocast."""

    def cast_first(q: Any, k: Any, v: Any, *options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return getattr(torch.ops.flashgen, operator)(*autocast(q, k, v), *options)

    for key in ("AutocastCUDA", "AutocastCPU"):
        library.impl(operator, cast_first, key)


def forward_shapes(q: Any, v: Any) -> tuple[Any, Any]:
    """``out`` and ``lse`` for queries in a batch or packed; both are contiguous, whatever the strides of q."""
    *batch, length, heads, _dim = q.shape
    out = q.new_empty((*batch, length, heads, v.shape[-1]))
    return out, q.new_empty((*batch, heads, length), dtype=torch.float32)
