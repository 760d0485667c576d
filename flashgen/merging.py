"""``merge``: attention to several sets of keys, from the results for each of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from flashgen.errors import ArgumentError


def merge(outputs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """O and the log-sum-exp of queries that attend to several disjoint sets of keys, from those of each set.

    A shared prefix, for example, is attended to once for all sequences, and each sequence's own keys by another call.
    ``outputs`` are ``(..., queries, heads, head_dim_v)`` and ``lses`` ``(..., heads, queries)``, as kernels return
    them, in arrays of NumPy, CuPy or torch. Sums are in float32; the merged O has the dtype of the first one. A row
    without keys in a set is no part of the result. A sink may be part of one set only.
    """
    outputs, lses = tuple(outputs), tuple(lses)
    _check(outputs, lses)
    library = sys.modules[type(outputs[0]).__module__.partition(".")[0]]
    parts = library.stack([_as_float32(lse, library) for lse in lses])
    most = library.amax(parts, 0)
    # Minus infinity less minus infinity would be NaN.
    zeros = library.zeros_like(most)
    shift = library.where(most == -float("inf"), zeros, most)
    weights = library.exp(parts - shift)
    total = weights.sum(0)
    has_keys = total > 0
    divisor = library.where(has_keys, total, zeros + 1)
    lse = library.where(has_keys, shift + library.log(divisor), most)
    scaled = library.moveaxis(weights / divisor, -1, -2)[..., None]
    out = sum(weight * _as_float32(output, library) for weight, output in zip(scaled, outputs, strict=True))
    return _cast(out, outputs[0].dtype), lse


def _check(outputs: tuple[Any, ...], lses: tuple[Any, ...]) -> None:
    if not outputs or len(outputs) != len(lses):
        raise ArgumentError(
            f"merge takes as many outputs as log-sum-exps, at least one; it was given {len(outputs)} and {len(lses)}"
        )
    shape = tuple(outputs[0].shape)
    rows = (*shape[:-3], shape[-2], shape[-3]) if len(shape) >= 3 else None
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if rows is None or tuple(output.shape) != shape or tuple(lse.shape) != rows:
            raise ArgumentError(
                f"outputs[{i}] has shape {tuple(output.shape)} and lses[{i}] {tuple(lse.shape)}; pass outputs of one "
                "shape (..., queries, heads, head_dim_v), each with its (..., heads, queries)"
            )


def _as_float32(array: Any, library: Any) -> Any:
    return _cast(array, library.float32)


def _cast(array: Any, dtype: Any) -> Any:
    return array.astype(dtype) if hasattr(array, "astype") else array.to(dtype)
