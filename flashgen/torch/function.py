"""The eager door: one ``autograd.Function`` around a kernel's two passes."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flashgen.torch.gradients import backward_with_captured
from flashgen.torch.packed import arrays_of, longest_of, sequences_of

#: Kernel, scale, Dropout and Sequences: one argument, since torch takes time for each.
How = tuple[Any, float | None, Any, Any]


def rows_contiguous(x: Any) -> Any:
    """The tensor itself if its last stride is 1, else a contiguous copy."""
    return x if x.stride()[-1] == 1 else x.contiguous()


def wants_gradients(*tensors: Any) -> bool:
    """Whether somebody may ask for gradients by one of them; what is no tensor is for others to refuse."""
    if torch.is_grad_enabled():
        for x in tensors:
            if getattr(x, "requires_grad", False):
                return True
    return False


def incoming(out: Any, do: Any, dlse: Any) -> tuple[Any, Any]:
    """Gradients of out and lse as kernels take them: an expanded one (as ``out.sum()`` gives) is copied.

    A loss may depend on one of them alone; then the other's is None.
    """
    do = torch.zeros_like(out) if do is None else rows_contiguous(do)
    return do, None if dlse is None else dlse.contiguous()


class AttentionFunction(torch.autograd.Function):
    """``(out, lse)``, both differentiable by q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, how: How) -> Any:
        """Runs the forward kernel and keeps what the backward pass needs."""
        kernel, scale, dropout, sequences = how
        out, lse = kernel(q, k, v, scale=scale, dropout=dropout, sequences=sequences)
        ctx.set_materialize_grads(False)
        if sequences is None:
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            ctx.save_for_backward(q, k, v, out, lse, *arrays_of(sequences))
        ctx.how = kernel, scale, dropout, longest_of(sequences)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        """Runs the backward kernels."""
        q, k, v, out, lse, *starts = ctx.saved_tensors
        do, dlse = incoming(out, do, dlse)
        kernel, scale, dropout, longest = ctx.how
        options = {"scale": scale, "dlse": dlse, "dropout": dropout, "sequences": sequences_of(starts, longest)}
        return *kernel.backward(do, q, k, v, out, lse, **options), None


class ProgramFunction(torch.autograd.Function):
    """The same for a kernel with captured tensors, which have gradients too."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        how: How,
        names: tuple[str, ...],
        *captured: Any,
    ) -> Any:
        """Runs the forward kernel and keeps what the backward pass needs."""
        kernel, scale, dropout, sequences = how
        given = dict(zip(names, captured, strict=True))
        out, lse = kernel(q, k, v, scale=scale, captured=given, dropout=dropout, sequences=sequences)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *captured, *arrays_of(sequences))
        ctx.how, ctx.names = (kernel, scale, dropout, longest_of(sequences)), names
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        """Runs the backward kernels; captured tensors that want no gradient cost nothing."""
        q, k, v, out, lse, *rest = ctx.saved_tensors
        captured, starts = rest[: len(ctx.names)], rest[len(ctx.names) :]
        wanted = ctx.needs_input_grad[5:]
        do, dlse = incoming(out, do, dlse)
        kernel, scale, dropout, longest = ctx.how
        options = {"scale": scale, "dlse": dlse, "dropout": dropout, "sequences": sequences_of(starts, longest)}
        arrays = do, q, k, v, out, lse
        dq, dk, dv, more = backward_with_captured(kernel, arrays, ctx.names, captured, wanted, options)
        return dq, dk, dv, None, None, *more


#: ``apply`` of the two: torch's own, before it looks for functorch's tensors among the arguments, which takes as long
#: as all else that it does. No function transform sees calls through this door.
attention_function: Any = super(torch.autograd.Function, AttentionFunction).apply
program_function: Any = super(torch.autograd.Function, ProgramFunction).apply
