"""Which pairs are dropped: the numbers that kernels draw, drawn in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.spec.dropout import NUMBER_BITS, Dropout

Words = NDArray[np.uint64]
_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def dropout_mask(dropout: Dropout, batch: int, heads: int, len_q: int, len_kv: int) -> NDArray[np.bool_]:
    """``[b, h, q, k]`` is true where the pair is kept."""
    kept = np.empty((batch, heads, len_q, len_kv), np.bool_)
    for b, h in np.ndindex(batch, heads):
        kept[b, h] = kept_pairs(dropout, b, h, len_q, len_kv)
    return kept


def kept_pairs(dropout: Dropout, b: int, h: int, len_q: int, len_kv: int) -> NDArray[np.bool_]:
    """``[q, k]`` is true where a pair of sequence b and head h is kept.

    One drawing is for queries q and q + 8 and keys k, k + 1, k + 8 and k + 9 of a block of 16 x 16.
    """
    seed, offset = _seed_and_offset(dropout)
    q, k = np.arange(len_q, dtype=np.uint64)[:, None], np.arange(len_kv, dtype=np.uint64)[None, :]
    row, column = q // 16 * 8 + q % 8, k // 16 * 4 + k % 8 // 2
    counter = [row, column, np.asarray(b << 16 | h, np.uint64), np.asarray(offset & 0xFFFFFFFF, np.uint64)]
    words = philox([np.broadcast_to(word, (len_q, len_kv)) for word in counter], seed ^ (offset >> 32 << 32))
    word = np.choose((k // 8 % 2 * 2 + q // 8 % 2).astype(np.intp), words)
    number = (word >> (16 * (k % 2))) & np.uint64(2**NUMBER_BITS - 1)
    return np.asarray(number >= dropout.dropped_below)


def philox(counter: list[Words], key: int) -> list[Words]:
    """Philox 4x32-10 of four words of 32 bits and a key of 64."""
    a, b, c, d = counter
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(_ROUNDS):
        first, second = _FACTORS[0] * a, _FACTORS[1] * c
        a, b = (second >> _HALF) ^ b ^ np.uint64(keys[0]), second & _LOW
        c, d = (first >> _HALF) ^ d ^ np.uint64(keys[1]), first & _LOW
        keys = [(word + step) & 0xFFFFFFFF for word, step in zip(keys, _STEPS, strict=True)]
    return [a, b, c, d]


def _seed_and_offset(dropout: Dropout) -> tuple[int, int]:
    if dropout.state is None:
        return dropout.seed, dropout.offset
    state: Any = np.asarray(dropout.state)
    seed, offset = (int(word) % 2**64 for word in state.reshape(-1).tolist())
    return seed, offset
