"""Where SGLang finds backends."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.model_runner import ModelRunner

Maker = Callable[[ModelRunner], AttentionBackend]
ATTENTION_BACKENDS: dict[str, Maker] = {}


def register_attention_backend(name: str) -> Callable[[Maker], Maker]:
    def register(make: Maker) -> Maker:
        ATTENTION_BACKENDS[name] = make
        return make

    return register
