"""``attention``: what people call, and the choice between the eager path and the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.spec import KVCache, Sequences
from flashgen.torch.cached import attend_cached, check_cached, check_page_scales, check_qv
from flashgen.torch.eight_bits import (
    EIGHT_BIT_ARGUMENTS,
    attend_eight_bits,
    check_eight_bits,
    is_eight_bit,
)
from flashgen.torch.function import call_kernel
from flashgen.torch.mask_and_score import program_of
from flashgen.torch.operators.attention import call_operator
from flashgen.torch.options import Options, check_dense, check_flags, number_of
from flashgen.torch.packed import arrays_of, check_sequences, longest_of
from flashgen.torch.program import Program, check_tensors
from flashgen.torch.replay import CallKey, replayed
from flashgen.torch.scales import NO_INPUT_SCALES, InputScales, Scales
from flashgen.torch.tensors import PLAIN_TYPES, needs_dispatcher, over_batch

_LAYOUTS = ("bshd", "bhsd")
_DEFAULTS = Options()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    layout: str = "bshd",
    sequences: Sequences | None = None,
    cache: KVCache | None = None,
    page_scales: bool = False,
    qv: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    scale_block: int | None = None,
    out_dtype: Any = None,
) -> Any:
    """Softmax attention with autograd: ``softmax(score(scale * q k^T), masked) v``.

    q is ``(B, Sq, H, D)``, k ``(B, Sk, Hk, D)``, v ``(B, Sk, Hk, Dv)``; with ``layout="bhsd"`` lengths and heads
    change places, here and in the output. k and v may have batch 1 under any batch of q. ``mask`` is a Mask such
    as ``flashgen.causal()``, a function ``(b, h, q, k) -> condition``, a tensor of bools that broadcasts to
    ``(B, H, Sq, Sk)``, or None for all keys; ``score`` a Score such as ``flashgen.softcap(30.0)``, a function
    ``(s, b, h, q, k) -> number``, or None. Tensors that they capture are torch tensors on q's device;
    float tensors that the score captured get gradients. ``scale`` defaults to 1/sqrt(D). ``deterministic=None``
    follows torch.use_deterministic_algorithms. Pairs are dropped with probability ``dropout_p``, which ones by
    torch's generator for q's device. With ``return_lse`` the result is ``(out, lse)``. The output
    is contiguous (in ``bshd``). Inputs whose last stride is not 1 are copied. Autocast casts q, k and v.

    With ``sequences``, a ``flashgen.Sequences``, q, k and v have no batch dimension: their rows are those of all
    sequences, one behind another, and ``lse`` is ``(H, total_q)``. To mask and score, b is the sequence.

    With ``cache``, a ``flashgen.KVCache``, k and v are a cache, contiguous or in pages. It says how many keys each
    sequence has and where they lie. There are no gradients and no dropout. ``flashgen.flash_attn_with_kvcache``
    also puts new keys into the cache. A cache may be in float8, beside 16-bit queries; with ``page_scales`` it has a
    scale for each page. With ``qv`` ``(B, Sq, H, Dv)`` values are part of the keys: the scores are ``q k^T + qv v^T``,
    and ``scale`` defaults to 1/sqrt(D + Dv).

    q, k and v may be ``torch.float8_e4m3fn``, without gradients. Their elements are multiplied by ``q_scale``,
    ``k_scale`` and ``v_scale``: numbers, or float32 tensors of shape (), (1,), (heads,) or (B, heads). With
    ``scale_block`` 64 or 128, so many rows share a scale, and shapes are (B, heads, ceil(length / scale_block)).
    ``out_dtype`` is torch.bfloat16 (the default) or torch.float16. With a cache in float8, ``q_scale`` may also have a
    number for each head of keys, and the other scales are those of the cache.
    """
    if cache is not None:
        check_cached(cache, dropout_p, sequences)
    if page_scales is not False:
        check_page_scales(page_scales, cache)
    if qv is not None:
        check_qv(cache)
    if type(dropout_p) is not float:
        dropout_p = number_of("dropout_p", dropout_p)
    if type(return_lse) is not bool:
        check_flags(return_lse=return_lse)
    if deterministic is not None and type(deterministic) is not bool:
        check_flags(deterministic=deterministic)
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ArgumentError(f"layout={show(layout)} is unknown; use 'bshd' or 'bhsd'")
    if layout == "bhsd":
        rows, packed = ["batch", "heads", "length", "dim"], ["heads", "total length", "dim"]
        names = rows if sequences is None else packed
        q = _swapped("q", q, names if cache is None or cache.cu_seqlens_q is None else packed)
        k, v = _swapped("k", k, names), _swapped("v", v, names)
        if qv is not None and cache is not None:
            qv = _swapped("qv", qv, names if cache.cu_seqlens_q is None else packed)
    if sequences is not None:
        check_sequences(sequences)
    # How many keys a sequence has is known on the device alone, so a tensor of all pairs cannot be checked.
    program, captured = program_of(mask, score, q, k if cache is None else None, sequences)
    options = Options(scale, deterministic, dropout_p, sequences)
    inputs = NO_INPUT_SCALES
    if is_eight_bit(q) or not q_scale is k_scale is v_scale is scale_block is out_dtype is None:
        inputs = InputScales(q_scale, k_scale, v_scale, scale_block, out_dtype)
        check_eight_bits(q, dict(zip(EIGHT_BIT_ARGUMENTS, inputs, strict=True)), cache)
    if cache is None:
        out, lse = attend(q, k, v, program, captured, options, scales=inputs)
    else:
        scales = Scales(cache.k_scale, cache.v_scale, page_scales, inputs.q, inputs.out_dtype)
        out, lse = attend_cached(q, k, v, cache, program, captured, scale, scales, qv)
    if layout == "bhsd":
        out = out.transpose(-3, -2)
    return (out, lse) if return_lse else out


def attend(
    q: Any,
    k: Any,
    v: Any,
    program: Program,
    captured: Sequence[Any] = (),
    options: Options = _DEFAULTS,
    key: CallKey | None = None,
    scales: InputScales = NO_INPUT_SCALES,
) -> tuple[Any, Any]:
    """``(out, lse)``: a call like one before is replayed; where something must see an operator, it does; else eagerly.

    ``key`` is what the caller looked for a call like this one by, and found none. ``scales`` are of 8-bit q, k and v.
    """
    if is_eight_bit(q):
        return attend_eight_bits(q, k, v, program, captured, options, scales)
    sequences = options.sequences
    if key is None and options.dropout_p == 0.0:
        constants = program.rule, options.scale, options.deterministic, longest_of(sequences), len(captured)
        key = (q, k, v, *captured, *arrays_of(sequences)), constants
        found = replayed(key)
        if found is not None:
            return found[0], found[1]
    check_dense(q=q, k=k, v=v)
    if sequences is None:
        k, v = over_batch(q, k), over_batch(q, v)
    if torch.compiler.is_compiling():
        return call_operator(q, k, v, program, captured, options)
    is_watched = needs_dispatcher(q, k, v)
    check_tensors(program.names, captured, q.device)
    if is_watched or any([type(tensor) not in PLAIN_TYPES for tensor in captured]):  # noqa: C419 (quicker)
        return call_operator(q, k, v, program, captured, options)
    return call_kernel(q, k, v, program, captured, options, key)


def _swapped(name: str, x: Any, dimensions: list[str]) -> Any:
    if not isinstance(x, torch.Tensor) or x.ndim != len(dimensions):
        shape = f" of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else ""
        raise ArgumentError(f"{name} is a {type(x).__qualname__}{shape}; pass a torch.Tensor ({', '.join(dimensions)})")
    return x.transpose(-3, -2)
