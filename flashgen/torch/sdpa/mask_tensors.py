"""Masks that are tensors: bools for ``attention``, and what torch's own attention function takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.spec import Sequences
from flashgen.spec.masks.tensor_masks import REMEDY, mask_function, problem_with
from flashgen.torch.tracing.program import Program, program_named

#: The name under which kernels take the tensor.
_NAME = "attn_mask"
#: The lowest finite float32. Everything below it is -inf, which excludes the key: the row may have no other key.
_LOWEST = torch.finfo(torch.float32).min
#: Lower logits count as this one. The output is the same without it: a row that has nothing but finfo.min averages its
#: values, as in torch. Gradients need it: below about -1e6, the float32 log-sum-exp of a row is too coarse to count the
#: row's keys.
_FLOOR = -float(2**20)


@lru_cache(maxsize=256)
def mask_program(dtype: torch.dtype, axes: str) -> Program:
    """The program of a bool mask (True: may attend) or of a float mask (added to the scaled logit).

    ``axes`` has one letter for each of the tensor's four dimensions: its index out of ``bhqk``, or ``0`` where the
    tensor has one element for all. Values and sizes do not matter.
    """
    element = f"{_NAME}[{', '.join(axes)}]"
    fields: dict[str, object] = {"captured": {_NAME: f"{str(dtype).removeprefix('torch.')}[{len(axes)}]"}}
    if dtype == torch.bool:
        fields["mask"] = {"where": element}
    else:
        fields["mask"] = {"where": f"{element} >= {_LOWEST!r}"}
        fields["score"] = f"maximum(s + {element}, {_FLOOR!r})"
    return program_named(json.dumps(fields))


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
