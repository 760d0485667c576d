"""Masks for caches of a fixed size, which have more keys than there are tokens, and count these on the device.

Where a mask of all pairs would be causal, it is two numbers for each sequence: where its keys end, and how many pad it
on the left. transformers takes a mask of four dimensions as it is, so these have four: ``(1, 1, 2, batch)``, int32.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.spec import KVCache
from flashgen.torch.cached import attend_cached
from flashgen.torch.program import Program


def lengths_of(batch: int, end: Any, attention_mask: Any) -> Any:
    """The numbers for keys up to ``end``; None where something other than keys on the left is masked."""
    ends = end.reshape(1).int().expand(batch)
    if attention_mask is None:
        return torch.stack([ends, torch.zeros_like(ends)])[None, None]
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        # Whether all others are there cannot be looked at.
        return None
    present = attention_mask.bool()
    left = (present.cumsum(-1) == 0).sum(-1)
    if not bool((left + present.sum(-1) == present.shape[-1]).all()):
        return None
    return torch.stack([ends, left.int()])[None, None]


def is_lengths(mask: Any) -> bool:
    """Whether a mask is of this kind."""
    return mask is not None and mask.dim() == 4 and mask.dtype == torch.int32


def whole_mask(lengths: Any, queries: int, keys: int) -> Any:
    """The mask of all pairs, (batch, 1, queries, keys)."""
    ends, left = lengths[0, 0, :, :, None, None, None]
    k = torch.arange(keys, device=lengths.device)
    q = torch.arange(queries, device=lengths.device)[:, None]
    return (k >= left) & (k <= ends - queries + q)


def attend_to_fixed(
    q: Any, k: Any, v: Any, lengths: Any, program: Program, captured: tuple[Any, ...], scale: float | None
) -> Any:
    """The output of queries that are the last of each sequence."""
    ends, left = lengths[0, 0]
    out, _ = attend_cached(q, k, v, KVCache(ends, leftpad=left), program, captured, scale)
    return out
