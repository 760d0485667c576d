"""The eager path: a kernel's two passes in one ``autograd.Function``, without the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from flashgen.kernel import Kernel
from flashgen.launch.call.batched_launch import Found, run
from flashgen.spec import Dropout
from flashgen.torch.gradients import backward_with_captured, incoming
from flashgen.torch.kernels import ALL_KEYS, decode_kernel_for, kernel_for, suits_decode
from flashgen.torch.options import Options
from flashgen.torch.packed import arrays_of, longest_of, sequences_of
from flashgen.torch.program import Program
from flashgen.torch.randomness import drawn_state, dropout_of
from flashgen.torch.replay import CallKey, remember
from flashgen.torch.tensors import kernel_inputs, wants_gradients


class KernelCall(NamedTuple):
    """A forward call, and what the backward pass needs. It is one value, since torch takes time for each argument."""

    found: Found
    kernel: Kernel
    scale: float | None
    dropout: Dropout | None
    #: Where packed sequences begin, and how long they may be.
    starts: Sequence[Any]
    longest: tuple[int, int] | None
    #: The names of captured tensors.
    names: tuple[str, ...]


class RecordedCall(NamedTuple):
    """How gradients are recorded of calls like one before, and where their tensors are among the arguments."""

    kernel: Kernel
    scale: float | None
    longest: tuple[int, int] | None
    names: tuple[str, ...]
    #: None for what is missing.
    captured_places: tuple[int | None, ...]
    starts_places: tuple[int | None, ...]
    #: What torch's switch must say, where the call followed it.
    deterministic: bool | None

    def call(self, found: Found, given: Sequence[Any]) -> tuple[Any, Any]:
        """``(out, lse)`` of a call on these arguments: q, k, v and others."""
        kernel, scale, longest, names, captured_places, starts_places, _ = self
        starts = [None if i is None else given[i] for i in starts_places]
        captured = [None if i is None else given[i] for i in captured_places]
        results: tuple[Any, Any] = attention_function(
            *given[:3], KernelCall(found, kernel, scale, None, starts, longest, names), *captured
        )
        return results


def call_kernel(
    q: Any, k: Any, v: Any, program: Program, captured: Sequence[Any], options: Options, key: CallKey | None
) -> tuple[Any, Any]:
    """``(out, lse)`` of plain tensors; with a ``key``, the call is remembered by it."""
    q, k, v = kernel_inputs(q, k, v)
    scale, deterministic, dropout_p, sequences, rng_state = options
    follows = torch.are_deterministic_algorithms_enabled() if deterministic is None else None
    reproducible = bool(follows if deterministic is None else deterministic)
    dropout = None if dropout_p == 0.0 else dropout_of(dropout_p, drawn_state(dropout_p, q, rng_state))
    gradients = wants_gradients(q, k, v, *captured)
    packed = sequences is not None
    passes = {"gradients": gradients, "deterministic": reproducible, "drops": dropout is not None, "packed": packed}
    named = dict(zip(program.names, captured, strict=True))
    if suits_decode(q, k, drops=dropout is not None, packed=packed):
        decoder = decode_kernel_for(q, v, program)
        kernel = kernel_for(q, v, program, **passes) if gradients else decoder
        found = decoder.executor.find_forward(q, k, v, scale, captured=named, cache=ALL_KEYS)
    else:
        kernel = kernel_for(q, v, program, **passes)
        found = kernel.executor.find_forward(q, k, v, scale, None, named, dropout, sequences)
    call = KernelCall(found, kernel, scale, dropout, arrays_of(sequences), longest_of(sequences), program.names)
    if key is not None and not (packed and _reads_offsets(kernel)):
        remember(key, [(found, ())], recorded=_recorded(key[0], call, captured, follows) if gradients else None)
    if gradients:
        out, lse = attention_function(q, k, v, call, *captured)
    else:
        out, lse, *_ = run(found, q)
    return out, lse


def _recorded(given: Sequence[Any], call: KernelCall, captured: Sequence[Any], follows: bool | None) -> RecordedCall:
    places = {id(x): i for i, x in enumerate(given) if x is not None}
    captured_places, starts_places = (tuple(places.get(id(x)) for x in some) for some in (captured, call.starts))
    return RecordedCall(
        call.kernel, call.scale, call.longest, call.names, captured_places, starts_places, deterministic=follows
    )


def _reads_offsets(kernel: Kernel) -> bool:
    """Whether a call reads on the host where packed sequences begin, as the emulator's calls do."""
    return kernel.target.on_host


class AttentionFunction(torch.autograd.Function):
    """``(out, lse)``, both differentiable by q, k, v and captured tensors."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, call: KernelCall, *captured: Any) -> Any:
        """Runs the forward kernel and keeps what the backward pass needs."""
        found, kernel, scale, dropout, starts, longest, names = call
        out, lse, *_ = run(found, q)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *captured, *starts)
        ctx.call = kernel, scale, dropout, longest, names
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        """Runs the backward kernels; captured tensors that want no gradient cost nothing."""
        q, k, v, out, lse, *rest = ctx.saved_tensors
        kernel, scale, dropout, longest, names = ctx.call
        captured, starts = rest[: len(names)], rest[len(names) :]
        do, dlse = incoming(out, do, dlse)
        options = {"scale": scale, "dlse": dlse, "dropout": dropout, "sequences": sequences_of(starts, longest)}
        arrays, wanted = (do, q, k, v, out, lse), ctx.needs_input_grad[4:]
        dq, dk, dv, more = backward_with_captured(kernel, arrays, names, captured, wanted, options)
        return dq, dk, dv, None, *more


#: torch's own ``apply``, before it looks for functorch's tensors among the arguments, which takes as long as all else
#: that it does. No function transform sees calls on this path.
attention_function: Any = super(torch.autograd.Function, AttentionFunction).apply
