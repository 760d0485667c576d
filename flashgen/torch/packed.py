"""Packed sequences as autograd and operators carry them: four tensors, two of which may be missing, and two numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.plan.varlen import COUNTS, STARTS
from flashgen.spec import Sequences

#: The names of these tensors.
ARRAYS = (*STARTS, *COUNTS)


def arrays_of(sequences: Sequences | None) -> tuple[Any, ...]:
    """Where sequences begin, and how much of each is used."""
    if sequences is None:
        return ()
    return sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.seqused_q, sequences.seqused_k


def longest_of(sequences: Sequences | None) -> tuple[int, int] | None:
    """The lengths that none of them exceeds."""
    return None if sequences is None else (sequences.max_seqlen_q, sequences.max_seqlen_k)


def sequences_of(arrays: Sequence[Any], longest: tuple[int, int] | None) -> Sequences | None:
    """The sequences of these two."""
    if longest is None:
        return None
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = arrays
    return Sequences(cu_seqlens_q, cu_seqlens_k, *longest, seqused_q, seqused_k)


def check_sequences(sequences: Any) -> None:
    """ArgumentError for what is none of torch's; the launch looks at types, sizes and devices."""
    if not isinstance(sequences, Sequences):
        raise ArgumentError(
            f"sequences={show(sequences)} says not where sequences begin; pass flashgen.Sequences(cu_seqlens_q, "
            "cu_seqlens_k, max_seqlen_q, max_seqlen_k), or None for a batch of one length"
        )
    starts = isinstance(sequences.cu_seqlens_q, torch.Tensor) and isinstance(sequences.cu_seqlens_k, torch.Tensor)
    if starts and sequences.seqused_q is None and sequences.seqused_k is None:
        return
    for name, array in zip(ARRAYS, arrays_of(sequences), strict=True):
        if not isinstance(array, torch.Tensor) and (array is not None or name in STARTS):
            raise ArgumentError(
                f"sequences.{name} is a {type(array).__qualname__}; pass a torch.Tensor of int32 beside q, made once: "
                "copying it there for each call would wait for the GPU"
            )
