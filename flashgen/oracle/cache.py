"""A cache of keys and values in NumPy: what is put into it, what is in it, and attention to that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.oracle.attention import forward
from flashgen.oracle.problem import array_of
from flashgen.oracle.rules import Floats, Lengths
from flashgen.spec import AttentionSpec, KVCache, Rotary

Array = NDArray[Any]


def forward_cached(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    cache: KVCache,
    *,
    scale: float | None = None,
    captured: Mapping[str, Any] | None = None,
) -> tuple[Floats, Floats]:
    """``(o, lse)`` of queries that attend to what the caches k and v hold."""
    keys, lengths = gathered(q.shape, k, cache)
    values, _ = gathered(q.shape, v, cache)
    bare = replace(spec, cache=None)
    return forward(bare, q, keys, values, scale=scale, captured=captured, lengths=lengths)


def gathered(q_shape: tuple[int, ...], x: Any, cache: KVCache) -> tuple[Array, Lengths]:
    """The keys or values of each sequence side by side, zeros behind them; and how many queries and keys each has."""
    x, batch = array_of("the cache", x), q_shape[0]
    found = []
    for b in range(batch):
        places = _places(x, cache, b)
        end = len(places)
        if cache.seqlens is not None:
            end = min(max(int(cache.seqlens[b]), 0) + cache.appended, end)
        first = 0 if cache.leftpad is None else min(max(int(cache.leftpad[b]), 0), end)
        found.append([x[place] for place in places[first:end]])
    rows = np.zeros((batch, max(map(len, found), default=0), *x.shape[2:]), x.dtype)
    for b, own in enumerate(found):
        if own:
            rows[b, : len(own)] = own
    return rows, [(q_shape[1], len(own)) for own in found]


def appended(x: Any, new: Any, cache: KVCache) -> Array:
    """A copy of the cache with new keys or values behind those that each sequence has; what has no room is left out."""
    found = np.array(x)
    for b in range(len(new)):
        start = int(cache.seqlens[b])
        for place, row in zip(_places(found, cache, b)[start:], new[b], strict=False):
            found[place] = row
    return found


def turned(x: Any, cache: KVCache, rotary: Rotary, *, one_position: bool = False) -> Floats:
    """Queries or new keys ``(B, S, H, D)``, turned by their positions."""
    cos, sin = (np.asarray(table).astype(np.float64) for table in (rotary.cos, rotary.sin))
    first = cache.seqlens if rotary.positions is None else rotary.positions
    steps = np.zeros(x.shape[1], np.int64) if one_position else np.arange(x.shape[1])
    positions = np.minimum(np.asarray(first)[:, None] + steps, len(cos) - 1)
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    found = np.asarray(x).astype(np.float64)
    pairs = cos.shape[1]
    if rotary.interleaved:
        places = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        places = slice(0, pairs), slice(pairs, 2 * pairs)
    a, b = found[..., places[0]].copy(), found[..., places[1]].copy()
    found[..., places[0]], found[..., places[1]] = a * c - b * s, a * s + b * c
    return found


def _places(x: Array, cache: KVCache, b: int) -> list[tuple[int, int]]:
    """Where the keys of a sequence lie, as many as there is room for; of pages only those that may be used."""
    row = b if cache.batch_idx is None else int(cache.batch_idx[b])
    if cache.block_table is None:
        return [(row, j) for j in range(x.shape[1])]
    return [(int(page), j) for page in cache.block_table[row] for j in range(x.shape[1])]
