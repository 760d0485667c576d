"""FlashAttention-3's ``q_descale``, ``k_descale`` and ``v_descale``: one number for a sequence and a head of keys."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.torch.eight_bits import check_eight_bits
from flashgen.torch.scales import NO_INPUT_SCALES, InputScales


def input_scales(q: Any, q_descale: Any, k_descale: Any, v_descale: Any) -> InputScales:
    """The scales of a call. Query heads that share keys share ``q_descale``."""
    if q_descale is k_descale is v_descale is None:
        return NO_INPUT_SCALES
    given = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    for name, x in given.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(x).__qualname__}; pass a float32 torch.Tensor (batch, heads_kv)")
    check_eight_bits(q, given)
    if q_descale is not None and q_descale.dim() == 2 and q.shape[-2] > q_descale.shape[1] > 0:
        q_descale = q_descale.repeat_interleave(q.shape[-2] // q_descale.shape[1], 1)
    return InputScales(q_descale, k_descale, v_descale)
