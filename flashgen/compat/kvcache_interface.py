"""FlashAttention-3's ``flash_attn_with_kvcache``."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.compat.kvcache import cache_of, lengths_of, rotary_of, with_kvcache
from flashgen.torch.options import check_flags
from flashgen.torch.replay import replayed


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    batch_invariant: bool = False,
    page_scales: bool = False,
) -> Any:
    """flash-attn 2's function with FlashAttention-3's arguments; ``page_table`` is its ``block_table``.

    With ``cu_seqlens_q`` q is ``(total_q, H, D)``, and so is the output; the log-sum-exp is ``(H, total_q)``. With
    ``cu_seqlens_k_new`` k is ``(total_new, Hk, D)``, and v alike: rows ``cu_seqlens_k_new[i]`` up to
    ``cu_seqlens_k_new[i + 1]`` come behind the keys of sequence i. Without k it means nothing.
    ``rotary_seqlens`` ``(B,)`` says at which positions the first new keys are, where it is not ``cache_seqlens``. With
    ``attention_chunk`` a query attends to its own chunk of so many positions. v_cache may have a head dimension of its
    own. With ``qv`` ``(B, Sq, H, Dv)``, or packed as q is, values are part of the keys and up to 512 wide. The scores
    are then ``q k^T + qv v^T``, and ``softmax_scale`` defaults to ``1 / sqrt(D + Dv)``. ``k_descale`` and ``v_descale``
    are for caches in float8, and ``q_descale`` is for q of ``torch.float8_e4m3fn`` beside them, as in flash-attn 2's
    function here.
    ``scheduler_metadata`` is that of ``get_scheduler_metadata``, or None. ``pack_gqa`` and ``sm_margin`` say how that
    library is to compute, and mean nothing here. That library lacks ``batch_invariant``, which is that of
    ``flashgen.KVCache``, and ``page_scales``.
    """
    if not type(causal) is type(rotary_interleaved) is type(return_softmax_lse) is type(page_scales) is bool:
        flags = {"rotary_interleaved": rotary_interleaved, "return_softmax_lse": return_softmax_lse}
        check_flags(causal=causal, **flags, page_scales=page_scales)
    if cache_seqlens is not None and not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = lengths_of(cache_seqlens, q, cu_seqlens_q)
    places = cache_seqlens, cache_batch_idx, cache_leftpad, page_table
    scales, of_queries = (k_descale, v_descale), (cu_seqlens_q, q_descale, qv)
    given = q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_seqlens, *places, *of_queries, *scales
    masking = causal, window_size, attention_chunk, softcap
    how = num_splits, batch_invariant, page_scales, max_seqlen_q, return_softmax_lse
    key = given, ("FA3 kvcache", softmax_scale, *masking, rotary_interleaved, *how)
    starts_new = None if k is None else cu_seqlens_k_new
    found = replayed(key) if starts_new is None else None
    if found is not None:
        return (found[0], found[1]) if return_softmax_lse else found[0]
    return with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary=rotary_of(rotary_cos, rotary_sin, rotary_interleaved, causal, window_size, rotary_seqlens),
        cache=cache_of(q, *places, num_splits, cu_seqlens_q, max_seqlen_q, None, batch_invariant, *scales),
        page_scales=page_scales,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        attention_chunk=attention_chunk,
        return_lse=return_softmax_lse,
        starts_new=starts_new,
        qv=qv,
        q_scale=q_descale,
        key=key,
    )
