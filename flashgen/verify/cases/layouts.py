"""How the arrays of a case lie in memory; what lies between and around their elements is NaN."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flashgen.verify.cases.huge_strides import HUGE_STRIDE_AXES, HugeStrideLayout, empty_with_huge_stride

OrdinaryLayout: TypeAlias = Literal[
    "contiguous", "heads-first", "wide-rows", "unaligned", "reversed", "one-batch", "one-head"
]
Layout: TypeAlias = OrdinaryLayout | HugeStrideLayout
ORDINARY_LAYOUTS: tuple[OrdinaryLayout, ...] = get_args(OrdinaryLayout)
LAYOUTS: tuple[Layout, ...] = (*ORDINARY_LAYOUTS, *get_args(HugeStrideLayout))


def laid_out(values: NDArray[Any], layout: Layout, dtype: DTypeLike) -> NDArray[Any]:
    """The values, (batch, length, heads, dim), rounded to a dtype, in an array of that layout."""
    view = _empty(values.shape, layout, np.dtype(dtype))
    if not view.flags.writeable:
        view.flags.writeable = True  # a broadcast view: the last values written count for all
    view[...] = values.astype(dtype)
    return view


def _empty(shape: tuple[int, ...], layout: Layout, dtype: np.dtype[Any]) -> NDArray[Any]:
    batch, length, heads, dim = shape

    def poisoned(*shape: int) -> NDArray[Any]:
        return np.full(shape, np.nan, dtype)

    if layout == "contiguous":
        return poisoned(batch, length, heads, dim)
    if layout in HUGE_STRIDE_AXES:
        return empty_with_huge_stride(shape, HUGE_STRIDE_AXES[layout], dtype)
    if layout == "heads-first":
        return np.moveaxis(poisoned(batch, heads, length, dim), 1, 2)
    if layout == "wide-rows":
        return poisoned(batch, length + 2, heads, dim + 16)[:, 1 : length + 1, :, :dim]
    if layout == "unaligned":
        return poisoned(batch, length, heads, dim + 2)[..., 1 : dim + 1]
    if layout == "reversed":
        return poisoned(batch, length, heads, dim)[:, ::-1]
    if layout == "one-batch":
        return np.broadcast_to(poisoned(min(batch, 1), length, heads, dim), shape)
    return np.broadcast_to(poisoned(batch, length, min(heads, 1), dim), shape)
