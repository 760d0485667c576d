"""flash-attn's functions: ``from flashgen.compat.flash_attn import flash_attn_func``.

Names, order, defaults and meaning of the arguments are those of flash-attn 2.8. What flashgen does not do is refused
by name, never ignored. Unlike there, head dims, dtypes and lengths are those of ``flashgen.attention``, and
``softmax_lse`` and ``alibi_slopes`` have gradients.
"""

from __future__ import annotations

from typing import Any

from flashgen.compat.arguments import attention, limits_of, sequences_of, unpack
from flashgen.compat.kvcache import attend_to_pages
from flashgen.compat.kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
from flashgen.compat.probabilities import signed_probabilities
from flashgen.errors import ArgumentError
from flashgen.spec import Dropout, Sequences
from flashgen.torch.options import check_flags, number_of
from flashgen.torch.randomness import drawn_state
from flashgen.torch.replay import replayed


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q ``(B, Sq, H, D)`` over k and v ``(B, Sk, Hk, D)``; ``out``, shaped like q.

    ``window_size=(left, right)`` lets query i see the keys from ``i + Sk - Sq - left`` to
    ``i + Sk - Sq + right``, -1 meaning no limit. ``softcap`` is the limit of ``tanh``, 0 for none, and
    ``alibi_slopes``, ``(H,)`` or ``(B, H)``, a penalty on ``|i + Sk - Sq - j|``. ``deterministic=False`` still follows
    torch's global switch. With ``return_attn_probs`` the result is ``(out, softmax_lse, S_dmask)``. The last is empty
    without dropout, as there; else it holds the probabilities of all pairs, ``(B, H, Sq, Sk)`` with lengths rounded up
    to 128, below 0 where a pair was dropped.
    """
    if not type(causal) is type(deterministic) is type(return_attn_probs) is bool:
        check_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    if type(dropout_p) is not float:
        dropout_p = number_of("dropout_p", dropout_p)
    if not return_attn_probs:
        rules, key = (softmax_scale, causal, window_size, softcap, deterministic), None
        if dropout_p == 0.0:
            key = (q, k, v, alibi_slopes), rules
            found = replayed(key)
            if found is not None:
                return found[0]
        return attention(q, k, v, *rules, alibi_slopes, dropout_p=dropout_p, key=key)[0]
    return _with_probabilities(
        q, k, v, None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` with keys and values in one tensor ``(B, Sk, 2, Hk, D)``."""
    k, v = unpack("kv", kv, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` with queries, keys and values in one tensor ``(B, S, 3, H, D)``."""
    q, k, v = unpack("qkv", qkv, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """``flash_attn_func`` for sequences of different lengths: q ``(total_q, H, D)``, k and v ``(total_k, Hk, D)``.

    Those of sequence i are rows ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]``, int32 and on q's device; none is longer
    than ``max_seqlen``. ``softmax_lse`` is ``(H, total_q)``, and ``alibi_slopes`` ``(H,)`` or ``(sequences, H)``.
    With ``block_table`` ``(sequences, pages of the longest)`` k and v are pages ``(pages, page_size, Hk, D)`` of any
    size, ``cu_seqlens_k`` says how many keys of them each sequence has, and there are no gradients.
    """
    if not type(causal) is type(deterministic) is type(return_attn_probs) is bool:
        check_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    if type(dropout_p) is not float:
        dropout_p = number_of("dropout_p", dropout_p)
    if block_table is not None:
        if dropout_p:
            raise ArgumentError(
                f"dropout_p={dropout_p!r} does not go with block_table; pass 0.0, which is for inference"
            )
        where = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table
        out, lse = attend_to_pages(q, k, v, *where, softmax_scale, causal, window_size, softcap, alibi_slopes)
        return (out, lse, out.new_empty(0)) if return_attn_probs else out
    rules, key = (softmax_scale, causal, window_size, softcap, deterministic), None
    if dropout_p == 0.0 and not return_attn_probs:
        key = (q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes), (max_seqlen_q, max_seqlen_k, *rules)
        found = replayed(key)
        if found is not None:
            return found[0]
    sequences = sequences_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if not return_attn_probs:
        out, _ = attention(q, k, v, *rules, alibi_slopes, dropout_p=dropout_p, sequences=sequences, key=key)
        return out
    return _with_probabilities(
        q, k, v, sequences, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` with keys and values in one tensor ``(total_k, 2, Hk, D)``."""
    k, v = unpack("kv", kv, 2, "total_k")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` with queries, keys and values in one tensor ``(total, 3, H, D)``."""
    q, k, v = unpack("qkv", qkv, 3, "total")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def _with_probabilities(
    q: Any,
    k: Any,
    v: Any,
    sequences: Sequences | None,
    dropout_p: float,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
) -> Any:
    """``(out, softmax_lse, S_dmask)``."""
    state = drawn_state(dropout_p, q)
    rules = scale, causal, window_size, softcap, deterministic, alibi_slopes
    out, lse = attention(q, k, v, *rules, dropout_p=dropout_p, sequences=sequences, rng_state=state)
    if state is None:
        return out, lse, out.new_empty(0)
    shown = {"scale": scale, "limits": limits_of(causal, window_size), "softcap": softcap, "slopes": alibi_slopes}
    dropout = Dropout(dropout_p, state=state)
    # Autocast may have changed what was attended to.
    q, k = q.to(out.dtype), k.to(out.dtype)
    return out, lse, signed_probabilities(q, k, lse, dropout, **shown, sequences=sequences)
