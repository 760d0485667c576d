"""Masks given to ``attention`` as tensors of bools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.spec import Sequences
from flashgen.spec.masks.tensor_masks import REMEDY, mask_function, problem_with


def function_of(mask: Any, q: Any, k: Any, sequences: Sequences | None) -> Callable[..., Any]:
    """The mask as a function, if it broadcasts to all pairs of the call."""
    element = "bool" if mask.dtype == torch.bool else str(mask.dtype).removeprefix("torch.")
    problem = problem_with(element, mask.shape)
    if problem is not None:
        raise ArgumentError(problem)
    sizes = _sizes(q, k, sequences)
    # What q and k lack is an error of theirs.
    if sizes is not None:
        for size, wanted in zip(mask.shape, sizes[-mask.dim() :], strict=True):
            if size not in (1, wanted):
                raise ArgumentError(
                    f"mask has shape {tuple(mask.shape)}, and this call has (batch, heads, len_q, len_kv) = "
                    f"{tuple(sizes)}; make each dimension as large, or 1, or {REMEDY}"
                )
    return mask_function(mask)


def _sizes(q: Any, k: Any, sequences: Sequences | None) -> tuple[Any, ...] | None:
    rank = 4 if sequences is None else 3
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == k.dim() == rank):
        return None
    if sequences is None:
        return q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    count = sequences.cu_seqlens_q.shape[0] - 1
    return count, q.shape[1], sequences.max_seqlen_q, sequences.max_seqlen_k
