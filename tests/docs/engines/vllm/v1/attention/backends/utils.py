"""What vLLM's backends share."""

from __future__ import annotations

from vllm.v1.attention.backend import CommonAttentionMetadata


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
) -> tuple[int, int, int, int]:
    lengths = common_attn_metadata.query_start_loc_cpu.diff().tolist()
    decodes = next((i for i, n in enumerate(lengths) if n > decode_threshold), len(lengths))
    tokens = sum(lengths[:decodes])
    return decodes, len(lengths) - decodes, tokens, common_attn_metadata.num_actual_tokens - tokens
