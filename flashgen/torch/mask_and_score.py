"""A mask and a score as people pass them, as one program: objects, functions and tensors of bools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.expr import is_tensor
from flashgen.spec import Mask, Score, Sequences, full
from flashgen.spec.masks.tensor_masks import REMEDY, mask_function, problem_with
from flashgen.torch.program import FULL, Program, kind_of, limits_of, written_program
from flashgen.torch.tracing.algebra import resolved
from flashgen.torch.tracing.compiling import recorded_program
from flashgen.torch.tracing.slots import traced


def program_of(mask: Any, score: Any, q: Any, k: Any, sequences: Sequences | None) -> tuple[Program, tuple[Any, ...]]:
    """The program of a mask and a score, and the tensors that they capture; q and k say how large a mask must be."""
    if isinstance(mask, torch.Tensor):
        mask = _function_of(mask, q, k, sequences)
    if score is None and mask is None:
        return FULL, ()
    if score is None and isinstance(mask, Mask) and mask.rest is None:
        return Program(limits_of(mask)), ()
    # torch.export without a compiler runs Python itself, so functions can be traced as usual.
    if torch.compiler.is_dynamo_compiling():
        return recorded_program(mask, score)
    return written_program(mask_of(resolved(mask)), score_of(resolved(score)))


def mask_of(mask: Any) -> Mask:
    """A mask as it is; a function of ``(b, h, q, k)`` as a mask."""
    if mask is None:
        return full()
    if isinstance(mask, Mask):
        return mask
    if is_tensor(mask):
        raise ArgumentError(f"mask is a {kind_of(mask)}; make it a torch tensor of bools beside q, once")
    if not callable(mask) or isinstance(mask, (type, Score)):
        raise ArgumentError(
            f"mask={show(mask)} is not a mask; use flashgen.causal(), flashgen.window(left, right), another mask, "
            "a function (b, h, q, k) -> condition, or None"
        )
    return Mask(rest=traced(mask, "mask"))


def score_of(score: Any) -> Score | None:
    """A score as it is; a function of ``(s, b, h, q, k)`` as a score."""
    if score is None or isinstance(score, Score):
        return score
    if is_tensor(score):
        raise ArgumentError(f"score is a {kind_of(score)}; pass flashgen.bias(tensor) to add it to the scores")
    if not callable(score) or isinstance(score, (type, Mask)):
        raise ArgumentError(
            f"score={show(score)} is not a score; use flashgen.softcap(cap), flashgen.alibi(slopes), another score, "
            "a function (s, b, h, q, k) -> number, or None"
        )
    return Score(traced(score, "score"))


def _function_of(mask: Any, q: Any, k: Any, sequences: Sequences | None) -> Callable[..., Any]:
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
