"""flash-attn's ``flash_attn_with_kvcache``: queries that attend to a cache, and new keys and values put into it."""

from __future__ import annotations

from operator import index
from typing import Any

import torch

from flashgen.common.show import show
from flashgen.compat.arguments import check_tensors, form_of, limits_of, whole
from flashgen.errors import ArgumentError
from flashgen.spec import KVCache, Rotary
from flashgen.torch.kernels import EIGHT_BIT_INPUTS, EIGHT_BITS
from flashgen.torch.operators.kvcache import attend_to_cache
from flashgen.torch.options import check_flags
from flashgen.torch.replay import RESULTS, CallKey, replayed
from flashgen.torch.scales import Scales
from flashgen.torch.sdpa.forms import program_for


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    batch_invariant: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    page_scales: bool = False,
) -> Any:
    """Attention of q ``(B, Sq, H, D)`` to a cache; ``out``, or with ``return_softmax_lse`` ``(out, softmax_lse)``.

    k_cache and v_cache are ``(rows, S, Hk, D)``, or with ``block_table`` ``(pages, page_size, Hk, D)`` with pages of
    any size. ``cache_seqlens``, a number or ``(B,)``, says how many keys each sequence has. k and v
    ``(B, Snew, Hk, D)`` are put behind these in place, and attended to. With ``rotary_cos`` and ``rotary_sin``
    ``(positions, rotary_dim / 2)`` k and q are turned by their positions; all queries by that of the first where
    neither ``causal`` nor a window is asked for. There are no gradients.

    A cache may be ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, beside 16-bit q, k and v. Its elements are then
    multiplied by ``k_descale`` and ``v_descale``, and new ones divided by them: float32 of shape ``()``, ``(1,)``,
    ``(Hk,)`` or ``(B, Hk)``, or with ``page_scales=True`` ``(pages,)`` or ``(pages, Hk)``. q, k and v may be
    ``torch.float8_e4m3fn``, too, and ``out`` is then ``torch.bfloat16``. q is multiplied by ``q_descale``, of one of
    the first four shapes, ``(H,)`` or ``(B, H)``. k and v have the cache's scales, and go into it as they are.
    ``batch_invariant`` is that of ``flashgen.KVCache``. flash-attn 2 has none of these five arguments.
    """
    if not type(causal) is type(rotary_interleaved) is type(return_softmax_lse) is type(page_scales) is bool:
        flags = {"rotary_interleaved": rotary_interleaved, "return_softmax_lse": return_softmax_lse}
        check_flags(causal=causal, **flags, page_scales=page_scales)
    if cache_seqlens is not None and not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = lengths_of(cache_seqlens, q)
    places = cache_seqlens, cache_batch_idx, cache_leftpad, block_table
    scales = k_descale, v_descale
    given = q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, *places, alibi_slopes, *scales, q_descale
    how = num_splits, batch_invariant, page_scales, return_softmax_lse
    key = given, ("kvcache", softmax_scale, causal, window_size, softcap, rotary_interleaved, *how)
    found = replayed(key)
    if found is not None:
        return (found[0], found[1]) if return_softmax_lse else found[0]
    return with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary=rotary_of(rotary_cos, rotary_sin, rotary_interleaved, causal, window_size),
        cache=cache_of(q, *places, num_splits, None, None, None, batch_invariant, *scales),
        page_scales=page_scales,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
        q_scale=q_descale,
        key=key,
    )


def with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    rotary: Rotary | None,
    cache: KVCache,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any = None,
    attention_chunk: int = 0,
    return_lse: bool,
    starts_new: Any = None,
    page_scales: bool = False,
    qv: Any = None,
    q_scale: Any = None,
    key: CallKey | None = None,
) -> Any:
    """What both generations' functions do; ``starts_new`` says where packed new keys begin."""
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    of_call = {"k": k, "v": v, "qv": qv, "alibi_slopes": alibi_slopes, "cu_seqlens_q": cache.cu_seqlens_q}
    of_call |= {"cache_batch_idx": cache.batch_idx, "cache_leftpad": cache.leftpad, "block_table": cache.block_table}
    of_call |= {"cu_seqlens_k_new": starts_new, "k_descale": cache.k_scale, "v_descale": cache.v_scale}
    of_call["q_descale"] = q_scale
    if rotary is not None:
        of_call |= {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "rotary_seqlens": rotary.positions}
    check_tensors(**{name: x for name, x in of_call.items() if x is not None})
    _check_ranks(4, k_cache=k_cache, v_cache=v_cache)
    _check_ranks(4 if cache.cu_seqlens_q is None else 3, q=q, qv=qv)
    _check_ranks(4 if starts_new is None else 3, k=k, v=v)
    if (k is None) != (v is None):
        raise ArgumentError("k and v go together: pass both, or neither")
    if k is None and rotary is not None:
        raise ArgumentError("rotary_cos and rotary_sin turn new keys and the queries beside them; pass k and v too")
    if k is not None and cache.seqlens is None:
        raise ArgumentError("cache_seqlens=None does not say behind which keys k and v come; pass how many there are")
    _check_dtypes(q, k_cache, v_cache, cache, q_scale)
    if starts_new is not None:
        _check_starts(starts_new, cache.seqlens, k, v)
    limits = limits_of(causal, window_size)
    form, tensors = form_of(q, limits, softcap, alibi_slopes, attention_chunk, cache.cu_seqlens_q)
    given = {"k": k, "v": v, "rotary": rotary, "scale": scale, "starts_new": starts_new, "qv": qv}
    given["scales"] = Scales(cache.k_scale, cache.v_scale, page_scales, q_scale)
    wanted = RESULTS if return_lse else RESULTS[:1]
    program, captured = program_for(form, tensors)
    out, lse = attend_to_cache(q, k_cache, v_cache, cache, program, captured, **given, key=key, wanted=wanted)
    return (out, lse) if return_lse else out


def lengths_of(number: Any, q: Any, starts: Any = None) -> Any:
    """How many keys each sequence has, where that is one number for all."""
    try:
        # A compiler leaves a number of Python's open, and takes others for constants.
        number = number if isinstance(number, int) else index(number)
    except TypeError:
        raise ArgumentError(
            f"cache_seqlens={show(number)} says not how many keys there are; pass an int, or an int32 tensor beside q"
        ) from None
    if not torch.compiler.is_compiling() and not -(2**31) <= number < 2**31:
        raise ArgumentError(f"cache_seqlens={show(number)} does not fit 32 bits; pass how many keys there are")
    check_tensors(q=q)
    batch = q.shape[0] if starts is None else starts.shape[0] - 1
    return torch.full((batch,), number, dtype=torch.int32, device=q.device)


def attend_to_pages(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    block_table: Any,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
) -> tuple[Any, Any]:
    """``(out, lse)`` of packed queries that attend to keys in pages, of which each sequence has its own number."""
    given = q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes
    rules = "pages", max_seqlen_q, scale, causal, window_size, softcap
    key = given, rules
    found = replayed(key)
    if found is not None:
        return found[0], found[1]
    check_tensors(cu_seqlens_k=cu_seqlens_k)
    result: tuple[Any, Any] = with_kvcache(
        *(q, k, v, None, None),
        rotary=None,
        cache=cache_of(q, None, None, None, block_table, 0, cu_seqlens_q, max_seqlen_q, cu_seqlens_k),
        scale=scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=True,
        key=key,
    )
    return result


def _check_dtypes(q: Any, k_cache: Any, v_cache: Any, cache: KVCache, q_scale: Any) -> None:
    """Both halves of a cache have one dtype, and scales are for one of eight bits."""
    if k_cache.dtype != v_cache.dtype:
        raise ArgumentError(f"k_cache is {k_cache.dtype} and v_cache is {v_cache.dtype}; they must be equal")
    if k_cache.dtype != q.dtype and k_cache.dtype not in EIGHT_BITS:
        raise ArgumentError(
            f"k_cache is {k_cache.dtype} and q is {q.dtype}; pass a cache in q's dtype, in torch.float8_e4m3fn or in "
            "torch.float8_e5m2"
        )
    for name, x in (("k_descale", cache.k_scale), ("v_descale", cache.v_scale)):
        if x is not None and k_cache.dtype not in EIGHT_BITS:
            raise ArgumentError(f"{name} is for caches in float8, and k_cache is {k_cache.dtype}; pass None")
    if q_scale is not None and q.dtype is not EIGHT_BIT_INPUTS:
        raise ArgumentError(f"q_descale is for q of {EIGHT_BIT_INPUTS}, and q is {q.dtype}; pass None")


def _check_starts(starts: Any, seqlens: Any, k: Any, v: Any) -> None:
    """Where packed new keys begin, one place for each sequence and the end."""
    batch = seqlens.shape[0] if seqlens.dim() == 1 else 0
    if starts.dtype != torch.int32 or starts.shape != (batch + 1,) or starts.device != k.device:
        raise ArgumentError(
            f"cu_seqlens_k_new is {starts.dtype} of shape {tuple(starts.shape)} on {starts.device}; pass {batch + 1} "
            f"int32 numbers on {k.device}: where the new keys of each of {batch} sequences begin, and the end"
        )
    if k.shape[0] != v.shape[0]:
        raise ArgumentError(f"k has {k.shape[0]} rows and v has {v.shape[0]}; they must be equal")


def _check_ranks(rank: int, **tensors: Any) -> None:
    for name, x in tensors.items():
        if x is not None and x.dim() != rank:
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}; it must have {rank} dimensions")


def cache_of(
    q: Any,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    block_table: Any,
    num_splits: int,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k: Any = None,
    batch_invariant: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
) -> KVCache:
    """Where the keys of each sequence lie."""
    longest = 0 if cu_seqlens_q is None else whole(max_seqlen_q) or max(q.shape[0], 1)
    places = cache_seqlens, cache_batch_idx, cache_leftpad, block_table
    of_queries = cu_seqlens_q, longest
    return KVCache(*places, 0, num_splits, *of_queries, cu_seqlens_k, batch_invariant, k_scale, v_scale)


def rotary_of(
    cos: Any, sin: Any, interleaved: bool, causal: bool, window_size: tuple[int, int], positions: Any = None
) -> Rotary | None:
    """How new keys and queries are turned; None for not at all."""
    if (cos is None) != (sin is None):
        raise ArgumentError("rotary_cos and rotary_sin go together: pass both, or neither")
    if cos is None:
        return None
    return Rotary(cos, sin, interleaved, positions, one_position=not causal and tuple(window_size) == (-1, -1))
