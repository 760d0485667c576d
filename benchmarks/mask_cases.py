"""The cases of the benchmark of masks and scores, as flashgen and as FlexAttention write them, ready to be called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mask_rows import Cell
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flashgen as fg

DEVICE = "cuda"
DTYPE = torch.bfloat16
#: Queries whose block mask is made at once: torch holds a byte for each of their pairs, and several at times.
BAND = 1024

Tensor = torch.Tensor
Mod = Callable[..., Any]


@dataclass(frozen=True)
class Variant:
    """One mask or score as both libraries write it."""

    spec: dict[str, Any]
    mask_mod: Mod | None = None
    score_mod: Mod | None = None


def causal_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
    """FlexAttention's causal mask."""
    return q >= k


def causal(cell: Cell) -> Variant:
    """Nothing but the order."""
    return Variant({"mask": fg.causal()}, causal_mod)


def window(cell: Cell) -> Variant:
    """The last 1024 keys."""
    mask = fg.causal() & fg.sliding_window(1023)
    return Variant({"mask": mask}, lambda b, h, q, k: (q >= k) & (q - k < 1024))


def documents(cell: Cell) -> Variant:
    """Sixteen documents of one length in each sequence."""
    ids = torch.arange(cell.length, device=DEVICE) // max(1, cell.length // 16)
    ids = ids.to(torch.int32).repeat(cell.batch, 1)
    mask = fg.causal() & fg.document(ids)
    return Variant({"mask": mask}, lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k]))


def prefix(cell: Cell) -> Variant:
    """A quarter of the sequence is seen by all."""
    shared = cell.length // 4
    return Variant({"mask": fg.prefix_lm(shared)}, lambda b, h, q, k: (q >= k) | (k < shared))


def alibi(cell: Cell) -> Variant:
    """Causal, with a penalty on distance."""
    slopes = torch.exp2(-8.0 * torch.arange(1, cell.heads + 1, device=DEVICE) / cell.heads)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (k - q)

    return Variant({"mask": fg.causal(), "score": score}, causal_mod, score)


def softcap(cell: Cell) -> Variant:
    """Causal, scores below 30."""
    score = fg.softcap(30.0)
    return Variant({"mask": fg.causal(), "score": score}, causal_mod, lambda s, b, h, q, k: torch.tanh(s / 30.0) * 30.0)


def bias(cell: Cell) -> Variant:
    """A number for every pair, the same for all heads: 8.6 GB at 65,536 tokens."""
    pairs = torch.randn(cell.length, cell.length, device=DEVICE, dtype=DTYPE)
    return Variant({"score": fg.bias(pairs)}, None, lambda s, b, h, q, k: s + pairs[q, k])


#: How each case of the table is made.
VARIANTS: dict[str, Callable[[Cell], Variant]] = {
    "causal": causal,
    "window 1024": window,
    "16 documents": documents,
    "prefix-LM": prefix,
    "ALiBi": alibi,
    "softcap": softcap,
    "bias": bias,
}


def block_mask(mod: Mod, cell: Cell) -> BlockMask:
    """FlexAttention's block mask, made for a band of queries at a time, since not all pairs fit into memory."""
    bands = []
    for first in range(0, cell.length, BAND):
        rows = min(BAND, cell.length - first)

        def shifted(b: Any, h: Any, q: Any, k: Any, first: int = first) -> Any:
            return mod(b, h, q + first, k)

        bands.append(create_block_mask(shifted, cell.batch, None, rows, cell.length, device=DEVICE))

    def whole(name: str) -> Any:
        return torch.cat([getattr(band, name) for band in bands], 2)

    return BlockMask.from_kv_blocks(
        whole("kv_num_blocks"),
        whole("kv_indices"),
        whole("full_kv_num_blocks"),
        whole("full_kv_indices"),
        mask_mod=mod,
    )


def flex(cell: Cell, variant: Variant) -> Callable[..., Any]:
    """FlexAttention as it is compiled for this cell alone, for q, k and v (batch, heads, length, head_dim)."""
    blocks = None if variant.mask_mod is None else block_mask(variant.mask_mod, cell)
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, score_mod=variant.score_mod, block_mask=blocks)


def kernel(cell: Cell, variant: Variant, **options: Any) -> fg.Kernel:
    """flashgen's kernels for this cell."""
    return fg.build(fg.AttentionSpec(cell.head_dim, **variant.spec, **options))


def tensors(cell: Cell) -> list[Tensor]:
    """q, k, v and the gradient of the output, (batch, length, heads, head_dim)."""
    torch.manual_seed(0)
    shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
    return [torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(4)]


def heads_first(x: Tensor) -> Tensor:
    """As FlexAttention takes it: a view, detached."""
    return x.transpose(1, 2).detach()
