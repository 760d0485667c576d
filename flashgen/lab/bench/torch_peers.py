"""Attention of torch, and of packages that take torch's tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashgen.lab.bench.candidate import Call, Prepare, RefusedError
from flashgen.lab.bench.case import Case, Inputs
from flashgen.lab.timing.device import Device

#: Attention on (batch, length, heads, head_dim) tensors.
Attention = Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _prepare(attention: Attention, case: Case, inputs: Inputs, device: Device) -> Call:
    if case.is_decode:
        attention = _decoding(attention, case)
    if case.pass_ == "forward":

        def forward() -> tuple[torch.Tensor]:
            with torch.no_grad():
                return (attention(case, inputs.q, inputs.k, inputs.v),)

        return forward
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = attention(case, *leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs.do, retain_graph=True)


def _decoding(attention: Attention, case: Case) -> Attention:
    """What attends to a cache; a RefusedError for what cannot."""
    if isinstance(attention, partial) and attention.func is _sdpa:
        if case.ragged:
            raise RefusedError("it has no lengths of sequences")
        if case.window is not None:
            raise RefusedError("it has no windows")
        if case.new_tokens > 1 and case.causal:
            raise RefusedError("its causal mask is aligned with the first key")
        return partial(_sdpa_decode, *attention.args)
    if attention in (_flash_attn, _flash_attn_3):
        return partial(_flash_decode, attention is _flash_attn_3)
    raise RefusedError("it has no function for a cache")


def _sdpa_decode(backend: SDPBackend, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, enable_gqa=case.heads != case.kv_heads).transpose(1, 2)


def _flash_decode(third: bool, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if third:
        from flash_attn_interface import flash_attn_with_kvcache
    else:
        from flash_attn.flash_attn_interface import flash_attn_with_kvcache
    window = (-1, -1) if case.window is None else (case.window, 0)
    lengths = _on_device(case.lengths, str(q.device)) if case.ragged else case.len
    return _first(flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=case.causal, window_size=window))


@cache
def _on_device(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    # A copy to the device would be timed in each call.
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def _sdpa(backend: SDPBackend, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=case.causal).transpose(1, 2)


@cache
def _flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Each case has its own sizes, and torch keeps only eight programs by default.
    torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 1024
    # The backward pass runs again and again, so it must not overwrite what the forward pass saved.
    if hasattr(torch._functorch.config, "donated_buffer"):
        torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False), create_block_mask


@cache
def _flex_mask(length: int, device: str) -> Any:
    return _flex()[1](lambda b, h, q, k: q >= k, None, None, length, length, device=device)


def _flex_attention(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = _flex_mask(case.len, str(q.device)) if case.causal else None
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out: torch.Tensor = _flex()[0](*heads_first, block_mask=mask)
    return out.transpose(1, 2)


def _first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _flash_attn(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from flash_attn.flash_attn_interface import flash_attn_func

    return _first(flash_attn_func(q, k, v, causal=case.causal))


def _flash_attn_3(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from flash_attn_interface import flash_attn_func

    return _first(flash_attn_func(q, k, v, causal=case.causal))


def _flash_attn_4(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from flash_attn.cute.interface import flash_attn_func

    return _first(flash_attn_func(q, k, v, causal=case.causal))


_ATTENTION: dict[str, Attention] = {
    "torch-math": partial(_sdpa, SDPBackend.MATH),
    "torch-efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "torch-cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "torch-flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "flex": _flex_attention,
    "flash-attn": _flash_attn,
    "flash-attn-3": _flash_attn_3,
    "flash-attn-4": _flash_attn_4,
}
PREPARE: dict[str, Prepare] = {name: partial(_prepare, attention) for name, attention in _ATTENTION.items()}
