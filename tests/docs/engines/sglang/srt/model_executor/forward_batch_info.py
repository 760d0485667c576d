"""What SGLang says of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from sglang.srt.layers.radix_attention import RadixAttention


class ForwardMode(Enum):
    EXTEND = 1
    DECODE = 2

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


class KVPool(Protocol):
    def get_key_buffer(self, layer_id: int) -> torch.Tensor: ...

    def get_value_buffer(self, layer_id: int) -> torch.Tensor: ...

    def set_kv_buffer(
        self, layer: RadixAttention, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None: ...


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    token_to_kv_pool: KVPool
    extend_num_tokens: int | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None
