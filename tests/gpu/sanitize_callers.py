"""One small call of each kernel for packed sequences, dropout, caches, decoding and FP8, for NVIDIA's checkers.

for tool in memcheck racecheck synccheck initcheck; do
    compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python tests/gpu/sanitize_callers.py
done

Names of functions below select some: ``python tests/gpu/sanitize_callers.py cached latent``. Results must be
finite. ``sanitize.py`` beside this file has the dense kernels, and says more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

import flashgen as fg
from flashgen.compat import flash_attn_interface as fa3

DEVICE, DTYPE, E4M3 = "cuda", torch.bfloat16, torch.float8_e4m3fn
LENGTHS = (130, 1, 0, 300, 77)
BATCH, HEADS, HEADS_KV = 3, 4, 2


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def integers(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def check(name: str, *results: torch.Tensor) -> None:
    torch.cuda.synchronize()
    assert all(torch.isfinite(x.float()).all() for x in results), name
    print(name, flush=True)


def packed(dim: int, *, dropout: float, deterministic: bool) -> None:
    starts = integers([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    total, longest = sum(LENGTHS), max(LENGTHS)
    q = normal(total, HEADS, dim).requires_grad_()
    k, v = (normal(total, HEADS_KV, dim).requires_grad_() for _ in range(2))
    out = fg.flash_attn_varlen_func(
        q, k, v, starts, starts, longest, longest, dropout, causal=True, deterministic=deterministic
    )
    gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    check(f"packed, D={dim}, dropout {dropout}, deterministic={deterministic}", out, *gradients)


def dropped(dim: int) -> None:
    q, k, v = (normal(2, 300, HEADS, dim).requires_grad_() for _ in range(3))
    out = fg.flash_attn_func(q, k, v, 0.1, causal=True)
    check(f"dropout, D={dim}", out, *torch.autograd.grad(out, (q, k, v), torch.randn_like(out)))


def pages_of(size: int, dim: int, dtype: torch.dtype, heads: int = HEADS_KV) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Keys and values in pages in any order, with room for 600 rows of each sequence."""
    each = -(-600 // size)
    table = torch.randperm(BATCH * each, device=DEVICE).view(BATCH, each).int()
    return [normal(BATCH * each, size, heads, dim, dtype=dtype) for _ in range(2)], table


def cached(dim: int, new: int, size: int, dtype: torch.dtype = DTYPE, queries: torch.dtype = DTYPE) -> None:
    """Appends, and attends to all: prefill of many new rows, decoding of few."""
    caches, table = pages_of(size, dim, dtype)
    scaled = "" if dtype == DTYPE else "kv" if queries == DTYPE else "qkv"
    scales = {f"{name}_descale": torch.ones(BATCH, HEADS_KV, device=DEVICE) for name in scaled}
    out, lse = fa3.flash_attn_with_kvcache(
        normal(BATCH, new, HEADS, dim, dtype=queries),
        *caches,
        *(normal(BATCH, new, HEADS_KV, dim, dtype=queries) for _ in range(2)),
        cache_seqlens=integers([0, 150, 300]),
        page_table=table,
        causal=True,
        return_softmax_lse=True,
        **scales,
    )[:2]
    check(f"{new} new rows in {queries} over pages of {size} in {dtype}, D={dim}", out, lse)


def latent(heads: int, tokens: int, size: int, longest: int) -> None:
    each = -(-longest // size)
    pages = normal(BATCH * each, size, 1, 576)
    out = fa3.flash_attn_with_kvcache(
        normal(BATCH, tokens, heads, 64),
        pages[..., 512:],
        pages[..., :512],
        qv=normal(BATCH, tokens, heads, 512),
        cache_seqlens=integers([longest, 5, 600]),
        page_table=torch.randperm(BATCH * each, device=DEVICE).view(BATCH, each).int(),
        causal=True,
    )
    check(f"latent vectors, {heads} heads, {tokens} new rows, pages of {size}", out)


def quantized(dim: int, mask: Any, block: int | None) -> None:
    q, k, v = normal(2, 330, HEADS, dim), normal(2, 470, HEADS_KV, dim), normal(2, 470, HEADS_KV, dim)
    check(f"FP8, D={dim}, {mask}, blocks of {block}", fg.fp8_attention(q, k, v, mask=mask, block=block))


def calls() -> Iterator[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]]:
    for dim in (64, 128, 256):
        for dropout, deterministic in ((0.0, False), (0.1, True)):
            yield packed, (dim,), {"dropout": dropout, "deterministic": deterministic}
        yield dropped, (dim,), {}
        for mask, block in ((fg.full(), None), (fg.causal(), 64), (fg.window(100, 10), 128)):
            yield quantized, (dim, mask, block), {}
    for dim, new, size in product((64, 128), (1, 300), (1, 16, 64, 256)):
        yield cached, (dim, new, size), {}
    for new, dtype, queries in product((1, 4, 100), (E4M3, torch.float8_e5m2), (DTYPE, E4M3)):
        yield cached, (128, new, 64, dtype, queries), {}
    for heads, tokens, size in ((128, 1, 64), (16, 1, 16), (64, 3, 1)):
        yield latent, (heads, tokens, size, 5000), {}


if __name__ == "__main__":
    for function, positional, named in calls():
        if not sys.argv[1:] or function.__name__ in sys.argv[1:]:
            function(*positional, **named)
