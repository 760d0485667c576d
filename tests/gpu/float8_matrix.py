"""FlashAttention-3's published tests of its dense function in float8, on any device: their calls, and the rule.

The rule is that of its 16-bit tests. The largest error may be twice that of the same formula in bfloat16, three times
with a softcap, plus the rounding error of ``x + 0.3 - 0.3`` in bfloat16. The kernel rounds P to e4m3, and so does the
formula: P as a share of the row's largest, times 256. FlashAttention-3 rounds P in both formulas, as a share of the
row's sum, so that in long rows all of P rounds to zero. ``kvcache_matrix`` has the tests of caches.
"""

from __future__ import annotations

from random import Random
from typing import Any

try:
    import torch
except ImportError:
    # Tests of this folder skip themselves; what they share must still import.
    torch = None

from tests.gpu.kvcache_matrix import Errors, allowed_pairs, codes, reference, scaled

HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 2)}


def sum_errors(q: Any, k: Any, v: Any, allowed: tuple[Any, Any], cap: float) -> Any:
    """Errors of O because Hopper adds up products of e4m3 in 14 bits: each sum of Q K^T loses part of the last one."""
    pairs, _ = allowed
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k * q.shape[-1] ** -0.5)
    lost = 2.0**-13 * q.shape[-1] ** 0.5 * scores.abs().masked_fill(~pairs, 0.0).amax(-1, keepdim=True)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~pairs, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", (weights * lost) ** 2, v**2).sqrt()


def check_output(
    function: Any,
    dim: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    mask: tuple[bool, bool],
    cap: float,
    random: Random,
    device: str,
) -> None:
    """``flash_attn_func`` with random scales of each sequence and head of keys."""
    (causal, local), (len_q, len_kv) = mask, lengths
    window = (random.randrange(len_kv), random.randrange(len_kv)) if local else (-1, -1)
    chunk = random.choice((0, random.randint(1, 2 * len_kv))) if causal or local else 0
    # With a cap, products reach its range.
    q = codes(2, len_q, heads[0], dim, device=device, size=cap / 4 or 1.0)
    k, v = (codes(2, len_kv, heads[1], dim, device=device) for _ in "kv")
    scales = [torch.rand(2, heads[1], device=device) * 2 for _ in "qkv"]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    options = {"causal": causal, "window_size": window, "attention_chunk": chunk, "softcap": cap}
    out = function(q, k, v, **options, **named, num_splits=random.choice((1, 3)), pack_gqa=random.choice((True, False)))
    assert out.dtype == torch.bfloat16
    numbers = [scaled(x, scale) for x, scale in zip((q, k, v), scales, strict=True)]
    allowed = allowed_pairs(lengths, causal, window, chunk, device)
    exact, rounded = (reference(*numbers, allowed, cap, rounds) for rounds in (None, "e4m3"))
    # The formula in bfloat16 adds up products in float32.
    rounded = rounded + (rounded - exact).sign() * sum_errors(*numbers, allowed, cap)
    Errors(out, exact, rounded).check(3 if cap else 2, (lengths, dim, heads, options))
