"""A backward call: gradients that come in, and those of captured tensors that go out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.torch.tensors import rows_contiguous


def incoming(out: Any, do: Any, dlse: Any) -> tuple[Any, Any]:
    """Gradients of out and lse as kernels take them: an expanded one (as ``out.sum()`` gives) is copied.

    A loss may depend on one of them alone; then the other's is None.
    """
    do = torch.zeros_like(out) if do is None else rows_contiguous(do)
    return do, None if dlse is None else dlse.contiguous()


def backward_with_captured(
    kernel: Any,
    arrays: tuple[Any, ...],
    names: tuple[str, ...],
    captured: Sequence[Any],
    wanted: Sequence[bool],
    options: Mapping[str, Any],
) -> tuple[Any, Any, Any, list[Any]]:
    """``(dq, dk, dv, gradients)``: one for each captured tensor, None where none is wanted.

    ``arrays`` and ``options`` are what else ``kernel.backward`` takes.
    A tensor that the scores do not depend on (a mask is a condition, which has no slope) has gradients of zero.
    """
    if names:
        options = {**options, "captured": dict(zip(names, captured, strict=True))}
    if not any(wanted):
        return *kernel.backward(*arrays, **options), [None] * len(names)
    dq, dk, dv, found = kernel.backward(*arrays, **options, captured_gradients=True)
    gradients = [
        _gradient(found.get(name), tensor) if want else None
        for name, tensor, want in zip(names, captured, wanted, strict=True)
    ]
    return dq, dk, dv, gradients


def _gradient(found: Any, tensor: Any) -> Any:
    return tensor.new_zeros(tensor.shape) if found is None else found.to(tensor.dtype)
