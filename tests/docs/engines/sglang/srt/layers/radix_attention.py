"""What SGLang says of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RadixAttention:
    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    logit_cap: float = 0.0
    #: Keys before a query's own; -1 for all.
    sliding_window_size: int = -1
