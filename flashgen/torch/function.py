"""The eager path: one ``autograd.Function`` around a kernel's two passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from flashgen.kernel import Kernel
from flashgen.launch.call.batched_launch import Found, run
from flashgen.spec import Dropout
from flashgen.torch.operators.gradients import backward_with_captured
from flashgen.torch.operators.packed import sequences_of

#: The forward call, and for the backward one kernel, scale, Dropout, where packed sequences are and how long they may
#: be: one argument, since torch takes time for each.
How = tuple[Found, Kernel, float | None, Dropout | None, Sequence[Any], tuple[int, int] | None]


class Recorded(NamedTuple):
    """How gradients are recorded of calls that are like one before, and what is where among their arguments."""

    kernel: Kernel
    scale: float | None
    #: Those of the captured tensors.
    names: tuple[str, ...]
    captured: tuple[int | None, ...]
    #: Where packed sequences are; None for what is missing.
    starts: tuple[int | None, ...]
    longest: tuple[int, int] | None
    #: What torch's switch has to say, where the call followed it.
    deterministic: bool | None


def recorded_of(given: Sequence[Any], how: How, captured: Mapping[str, Any], follows: bool | None) -> Recorded:
    """What calls like one that records gradients need; ``given`` are the arguments of this one."""
    _, kernel, scale, _, starts, longest = how
    places = {id(x): i for i, x in enumerate(given) if x is not None}
    of_captured, of_starts = ([places.get(id(x)) for x in some] for some in (captured.values(), starts))
    return Recorded(kernel, scale, tuple(captured), tuple(of_captured), tuple(of_starts), longest, follows)


def recorded_again(found: Found, given: Sequence[Any], recorded: Recorded) -> tuple[Any, Any]:
    """``(out, lse)`` of a call that was found, of which ``given`` are the arguments: q, k, v and others."""
    q, k, v = given[:3]
    kernel, scale, names, captured, starts, longest, _ = recorded
    how = found, kernel, scale, None, [None if i is None else given[i] for i in starts], longest
    results: tuple[Any, Any]
    if names:
        results = program_function(q, k, v, how, names, *[None if i is None else given[i] for i in captured])
    else:
        results = attention_function(q, k, v, how)
    return results


def rows_contiguous(x: Any) -> Any:
    """The tensor itself if its last stride is 1, else a contiguous copy."""
    return x if x.stride()[-1] == 1 else x.contiguous()


def over_batch(q: Any, x: Any) -> Any:
    """Keys or values of batch 1 as those of each sequence: with a stride of 0, and gradients that torch sums."""
    if isinstance(q, torch.Tensor) and isinstance(x, torch.Tensor) and q.dim() == x.dim() == 4:
        return x if x.shape[0] != 1 or q.shape[0] == 1 else x.expand(q.shape[0], -1, -1, -1)
    return x


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
        found, kernel, scale, dropout, starts, longest = how
        out, lse, *_ = run(found, q)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *starts)
        ctx.how = kernel, scale, dropout, longest
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
        found, kernel, scale, dropout, starts, longest = how
        out, lse, *_ = run(found, q)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *captured, *starts)
        ctx.how, ctx.names = (kernel, scale, dropout, longest), names
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
#: as all else that it does. No function transform sees calls on this path.
attention_function: Any = super(torch.autograd.Function, AttentionFunction).apply
program_function: Any = super(torch.autograd.Function, ProgramFunction).apply
