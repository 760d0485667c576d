"""``S_dmask``: the probabilities of all pairs with a sign that says which were dropped.

Kernels never write them, so they are computed again, by torch: for looking at, at the price of all pairs in memory.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.spec import Dropout, Sequences
from flashgen.spec.dropout import NUMBER_BITS

_MASK = 2**32 - 1
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
#: flash-attn's lengths are multiples of this.
_ROUNDED_TO = 128


@torch.no_grad()  # type: ignore[untyped-decorator]
def signed_probabilities(
    q: Any,
    k: Any,
    lse: Any,
    dropout: Dropout,
    *,
    scale: float | None,
    limits: tuple[int | None, int | None],
    softcap: float,
    slopes: Any,
    sequences: Sequences | None,
) -> Any:
    """(batch, heads, queries, keys) in q's dtype: below 0 where a pair was dropped, 0 where there is none."""
    heads = q.shape[-2]
    lengths: tuple[Any, Any] = q.shape[1], k.shape[1]
    if sequences is not None:
        q, lengths_q = _as_batch(q, sequences.cu_seqlens_q, sequences.max_seqlen_q)
        k, lengths_k = _as_batch(k, sequences.cu_seqlens_k, sequences.max_seqlen_k)
        lse = _as_batch(lse.transpose(0, 1), sequences.cu_seqlens_q, sequences.max_seqlen_q)[0].transpose(1, 2)
        lengths = lengths_q.view(-1, 1, 1, 1), lengths_k.view(-1, 1, 1, 1)
    keys = k.repeat_interleave(heads // k.shape[2], 2)
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), keys.float())
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(q.shape[1], device=q.device)[:, None]
    columns = torch.arange(k.shape[1], device=q.device)
    distance = columns - rows - (lengths[1] - lengths[0])
    if slopes is not None:
        scores = scores - slopes.float().view(-1, heads, 1, 1) * distance.abs()
    exists = (rows < lengths[0]) & (columns < lengths[1])
    left, right = limits
    if left is not None:
        exists = exists & (distance >= -left)
    if right is not None:
        exists = exists & (distance <= right)
    weights = torch.where(exists, torch.exp(scores - lse[..., None]), 0.0).to(q.dtype)
    weights = torch.where(kept_pairs(dropout, *weights.shape), weights, -weights)
    missing = [-length % _ROUNDED_TO for length in weights.shape[2:]]
    return torch.nn.functional.pad(weights, (0, missing[1], 0, missing[0]))


def kept_pairs(dropout: Dropout, batch: int, heads: int, len_q: int, len_k: int) -> Any:
    """``[b, h, q, k]`` is true where a pair is kept; what ``flashgen.oracle`` computes, on the state's device.

    One drawing is for queries q and q + 8 and keys k, k + 1, k + 8 and k + 9 of a block of 16 x 16.
    """
    device = dropout.state.device
    q, k = torch.arange(len_q, device=device)[:, None], torch.arange(len_k, device=device)
    b, h = torch.arange(batch, device=device)[:, None, None, None], torch.arange(heads, device=device)[:, None, None]
    seed, offset = dropout.state.unbind()
    rows, columns = -(-len_q // 16) * 8, -(-len_k // 16) * 4
    counter = (
        torch.arange(rows, device=device)[:, None],
        torch.arange(columns, device=device),
        b << 16 | h,
        offset & _MASK,
    )
    low, high = seed & _MASK, (seed >> 32 ^ offset >> 32) & _MASK
    words = torch.stack(_philox(list(torch.broadcast_tensors(*counter)), [low, high]), 2)
    # Two numbers in each; what there is one of for every pair takes few bits.
    numbers = torch.stack([(words >> at & 2**NUMBER_BITS - 1).int() for at in (0, 16)], 2)
    of_pair = numbers[:, :, k % 2, k // 8 % 2 * 2 + q // 8 % 2, q // 16 * 8 + q % 8, k // 16 * 4 + k % 8 // 2]
    return of_pair >= dropout.dropped_below


def _philox(counter: list[Any], keys: list[Any]) -> list[Any]:
    """Philox 4x32-10 of four words and two keys of 32 bits each, in integers of 64."""
    a, b, c, d = counter
    for _ in range(_ROUNDS):
        (above_a, below_a), (above_c, below_c) = _product(a, _FACTORS[0]), _product(c, _FACTORS[1])
        a, b, c, d = above_c ^ b ^ keys[0], below_c, above_a ^ d ^ keys[1], below_a
        keys = [(key + step) & _MASK for key, step in zip(keys, _STEPS, strict=True)]
    return [a, b, c, d]


def _product(word: Any, factor: int) -> tuple[Any, Any]:
    """The upper and the lower 32 bits; a product of all bits would not fit a signed integer."""
    lower, upper = word * (factor & 0xFFFF), word * (factor >> 16)
    middle = (lower >> 16) + upper
    return middle >> 16, (middle & 0xFFFF) << 16 | lower & 0xFFFF


def _as_batch(x: Any, starts: Any, longest: int) -> tuple[Any, Any]:
    """Rows of sequences as a batch, zeros behind the last of each, and how many each has."""
    starts = starts.long()
    lengths = starts.diff()
    places = torch.arange(longest, device=x.device)
    rows = torch.where(places < lengths[:, None], starts[:-1, None] + places, x.shape[0])
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows], lengths
