"""The eager door: one ``autograd.Function`` around a kernel's two passes."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flashgen.torch.gradients import backward_with_captured


def rows_contiguous(x: Any) -> Any:
    """The tensor itself if its last stride is 1, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


class AttentionFunction(torch.autograd.Function):
    """``(out, lse)`` with gradients for q, k and v; lse is a by-product without a gradient."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, scale: float | None, kernel: Any) -> Any:
        """Runs the forward kernel and keeps what the backward pass needs."""
        out, lse = kernel(q, k, v, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.scale, ctx.kernel = scale, kernel
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Any, _: Any) -> Any:
        """Runs the backward kernels. An expanded ``do`` (as ``out.sum()`` gives) is copied first."""
        q, k, v, out, lse = ctx.saved_tensors
        gradients = ctx.kernel.backward(rows_contiguous(do), q, k, v, out, lse, scale=ctx.scale)
        return *gradients, None, None


class ProgramFunction(torch.autograd.Function):
    """The same for a kernel with captured tensors, which have gradients too."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, scale: float | None, kernel: Any, names: tuple[str, ...], *captured: Any
    ) -> Any:
        """Runs the forward kernel and keeps what the backward pass needs."""
        out, lse = kernel(q, k, v, scale=scale, captured=dict(zip(names, captured, strict=True)))
        ctx.save_for_backward(q, k, v, out, lse, *captured)
        ctx.mark_non_differentiable(lse)
        ctx.scale, ctx.kernel, ctx.names = scale, kernel, names
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Any, _: Any) -> Any:
        """Runs the backward kernels; captured tensors that want no gradient cost nothing."""
        q, k, v, out, lse, *captured = ctx.saved_tensors
        wanted = ctx.needs_input_grad[6:]
        dq, dk, dv, more = backward_with_captured(
            ctx.kernel, (rows_contiguous(do), q, k, v, out, lse), ctx.scale, ctx.names, captured, wanted
        )
        return dq, dk, dv, None, None, None, *more
