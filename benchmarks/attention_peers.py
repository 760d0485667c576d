"""Whose attention is timed: flashgen's, PyTorch's backends, and FlashAttention's packages where they are installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as functional
from attention_rows import OURS, Problem
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen as fg

#: Attention on (batch, length, heads, head_dim) tensors as a problem has it.
Attention = Callable[[Problem, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class CannotError(Exception):
    """A peer has no such thing; its text says which."""


def backend(which: SDPBackend) -> Attention:
    """A backend of torch's scaled_dot_product_attention."""

    def run(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if problem.window is not None or problem.softcap is not None:
            raise CannotError("it has neither windows nor softcaps")
        if problem.causal and problem.queries != problem.keys:
            raise CannotError("its causal mask begins at the upper left")
        with sdpa_kernel(which):
            out = functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=problem.causal,
                enable_gqa=problem.heads != problem.kv_heads,
            )
        return out.transpose(1, 2)

    return run


@cache
def _vllm() -> Any:
    torch.ops.load_library(os.environ["FA3_LIBRARY"])
    return torch.ops._vllm_fa3_C.fwd


def fa3(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention-3: its package, or vLLM's build of its forward pass, which FA3_LIBRARY names."""
    left, right = (-1, -1) if problem.window is None else (problem.window - 1, 0)
    cap = problem.softcap or 0.0
    if "FA3_LIBRARY" not in os.environ:
        from flash_attn_interface import flash_attn_func

        out = flash_attn_func(q, k, v, causal=problem.causal, window_size=(left, right), softcap=cap)
        return out[0] if isinstance(out, tuple) else out
    if problem.direction == "backward":
        raise CannotError("this build has no backward pass")
    starts_q, starts_k = (
        torch.arange(0, (x.shape[0] + 1) * x.shape[1], x.shape[1], device=x.device, dtype=torch.int32) for x in (q, k)
    )
    rows = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    lengths = (problem.queries, problem.keys)
    window = (left, right)
    out = vllm_fa3(*rows, starts_q, starts_k, longest=lengths, causal=problem.causal, window=window, softcap=cap)
    return out.view(q.shape)


def vllm_fa3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor | None = None,
    *,
    longest: tuple[int, int],
    causal: bool,
    lengths_k: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    qv: torch.Tensor | None = None,
    descales: tuple[torch.Tensor | None, ...] = (None, None, None),
) -> torch.Tensor:
    """The forward pass of vLLM's build, of packed queries; keys are packed, too, or lie in the pages of a table.

    ``descales`` are those of 8-bit queries, keys and values. As in vLLM, the kernel's heuristic says into how many
    parts the keys of a sequence are split.
    """
    # Nothing new for a cache; neither rows of it, nor left padding and rotary embeddings.
    nothing: tuple[None, ...] = (None,) * 5
    columns = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    # 1 would mean that keys are never split.
    num_splits = 0
    return _vllm()(
        q, k, v, None, None, qv, None, starts_q, starts_k, None, None, lengths_k, *longest, table, *nothing,
        *descales, columns**-0.5, causal, *window, softcap, True, None, num_splits, None, 0, None, 1, 0, None,
    )[0]  # fmt: skip


def fa4(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention-4, where its package is installed."""
    from flash_attn.cute.interface import flash_attn_func

    window = (None, None) if problem.window is None else (problem.window - 1, 0)
    out = flash_attn_func(q, k, v, causal=problem.causal, window_size=window, softcap=problem.softcap or 0.0)
    return out[0] if isinstance(out, tuple) else out


def flashgen(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """This project's kernels behind flash-attn's name."""
    window = (-1, -1) if problem.window is None else (problem.window - 1, 0)
    return fg.flash_attn_func(q, k, v, causal=problem.causal, window_size=window, softcap=problem.softcap or 0.0)


PEERS: dict[str, Attention] = {
    "fa2": backend(SDPBackend.FLASH_ATTENTION),
    "cudnn": backend(SDPBackend.CUDNN_ATTENTION),
    "fa3": fa3,
    "fa4": fa4,
}
IMPLEMENTATIONS = {**PEERS, OURS: flashgen}
