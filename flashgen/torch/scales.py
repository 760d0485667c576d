"""The scales of 8-bit caches, and of 8-bit queries: layers that share all else of a ``KVCache`` have their own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.torch.options import check_flags


class Scales(NamedTuple):
    """What the elements of a cache are multiplied by, as in ``KVCache``, and those of 8-bit queries."""

    k: Any = None
    v: Any = None
    #: Whether each page has its own.
    of_pages: bool = False
    #: Of 8-bit queries: a number, too.
    q: Any = None
    #: The dtype of what 8-bit queries get; None: torch.bfloat16.
    out_dtype: Any = None


NO_SCALES = Scales()


class InputScales(NamedTuple):
    """What elements of 8-bit q, k and v are multiplied by, and the dtype of what comes out."""

    q: Any = None
    k: Any = None
    v: Any = None
    #: How many rows share a scale; None: all rows of a head.
    block: int | None = None
    #: None: torch.bfloat16.
    out_dtype: Any = None


NO_INPUT_SCALES = InputScales()


def scales_of(k_scale: Any, v_scale: Any, page_scales: bool, q_scale: Any = None, out_dtype: Any = None) -> Scales:
    """The scales of a call whose sequences all have the same ones; an ArgumentError for others."""
    if k_scale is v_scale is q_scale is out_dtype is None and page_scales is False:
        return NO_SCALES
    check_flags(page_scales=page_scales)
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale), ("q_scale", q_scale)):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(x).__qualname__}; pass a float32 torch.Tensor beside the cache")
        if x.dim() > 1 and not (page_scales and name != "q_scale"):
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}; pass one number or one for each head, which all sequences share"
            )
    return Scales(k_scale, v_scale, page_scales, q_scale, out_dtype)


def out_dtype_of(dtype: Any) -> Any:
    """The dtype of what 8-bit queries get; an ArgumentError for others than two."""
    if dtype is None:
        return torch.bfloat16
    if dtype is not torch.bfloat16 and dtype is not torch.float16:
        raise ArgumentError(f"out_dtype={show(dtype)} is not supported; use torch.bfloat16 or torch.float16")
    return dtype
