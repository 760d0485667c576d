"""What to compute (AttentionSpec, masks, scores) and how to lay it out (Schedule).

Masks beyond bands and scores load on first use: they bring NumPy with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.common.lazy import lazy_names
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.dropout import Dropout
from flashgen.spec.kvcache import KVCache, Rotary
from flashgen.spec.masks.mask import Mask, causal, full, window
from flashgen.spec.schedule import BackwardSchedule, Schedule, WarpPartition
from flashgen.spec.sequences import Sequences

if TYPE_CHECKING:
    from flashgen.spec.masks.named import (
        block_sparse,
        chunked,
        dilated,
        document,
        global_tokens,
        key_padding,
        prefix_lm,
        sliding_window,
    )
    from flashgen.spec.score import Score, alibi, bias, relative_bias, sink, softcap
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {"flashgen.spec.score": ("Score", "alibi", "bias", "relative_bias", "sink", "softcap")},
        rest="flashgen.spec.masks.named",
    )

__all__ = [
    "AttentionSpec",
    "BackwardSchedule",
    "Dropout",
    "KVCache",
    "Mask",
    "Rotary",
    "Schedule",
    "Score",
    "Sequences",
    "WarpPartition",
    "alibi",
    "bias",
    "block_sparse",
    "causal",
    "chunked",
    "dilated",
    "document",
    "full",
    "global_tokens",
    "key_padding",
    "prefix_lm",
    "relative_bias",
    "sink",
    "sliding_window",
    "softcap",
    "window",
]
