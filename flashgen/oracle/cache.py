"""A cache of keys and values in NumPy: what is put into it, what is in it, and attention to that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashgen.oracle.attention import forward
from flashgen.oracle.eight_bits import cache_dtype_of, codes_of, quantized, values_of
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
    qv: Any = None,
    q_scale: Any = None,
) -> tuple[Floats, Floats]:
    """``(o, lse)`` of queries that attend to what the caches k and v hold.

    8-bit queries are multiplied by ``q_scale``, which has numbers for query heads or for heads of keys.
    """
    if q_scale is not None:
        q_scale = _of_query_heads(np.asarray(q_scale), q.shape[2], k.shape[2])
    keys, lengths = gathered(q.shape, k, cache, scale=cache.k_scale, page_scales=spec.page_scales)
    values, _ = gathered(q.shape, v, cache, scale=cache.v_scale, page_scales=spec.page_scales)
    bare = replace(spec, cache_dtype=None, page_scales=False)
    how: dict[str, Any] = {"scale": scale, "captured": captured, "lengths": lengths, "qv": qv}
    return forward(bare, q, keys, values, q_scale=q_scale, **how)


def gathered(
    q_shape: tuple[int, ...], x: Any, cache: KVCache, *, scale: Any = None, page_scales: bool = False
) -> tuple[Array, Lengths]:
    """The keys or values of each sequence side by side, zeros behind them; and how many queries and keys each has.

    8-bit ones are multiplied by ``scale``.
    """
    x, batch = array_of("the cache", x), q_shape[0]
    dtype, scales = cache_dtype_of(x), _Scales.of(scale, x.shape[2], page_scales)
    if dtype is not None:
        x = values_of(dtype.name)[codes_of(x)]
    found = []
    for b in range(batch):
        places = _places(x, cache, b)
        end = len(places)
        if cache.seqlens is not None:
            end = min(max(int(cache.seqlens[b]), 0) + cache.appended, end)
        first = 0 if cache.leftpad is None else min(max(int(cache.leftpad[b]), 0), end)
        found.append([scales.times(x[place], b, place) if dtype else x[place] for place in places[first:end]])
    rows = np.zeros((batch, max(map(len, found), default=0), *x.shape[2:]), x.dtype)
    for b, own in enumerate(found):
        if own:
            rows[b, : len(own)] = own
    return rows, [(q_shape[1], len(own)) for own in found]


def appended(x: Any, new: Any, cache: KVCache, *, scale: Any = None, page_scales: bool = False) -> Array:
    """A copy of the cache with new keys or values behind those that each sequence has; what has no room is left out.

    For an 8-bit cache they are divided by ``scale`` and rounded. 8-bit ones have that scale already.
    """
    found = np.array(x)
    dtype, of_new = cache_dtype_of(found), cache_dtype_of(new)
    if of_new is not None and of_new != dtype:
        new, scale, page_scales = values_of(of_new.name)[codes_of(new)], None, False
    scales = _Scales.of(scale, found.shape[2], page_scales)
    for b in range(len(new)):
        start = int(cache.seqlens[b])
        for place, row in zip(_places(found, cache, b)[start:], new[b], strict=False):
            if dtype is None or dtype == of_new:
                found[place] = row
            else:
                codes_of(found)[place] = quantized(dtype.name, row, scales.at(b, place)[:, None])
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


class _Scales(NamedTuple):
    """The scales of sequences, or of pages, and heads."""

    values: Floats
    by_page: bool

    @classmethod
    def of(cls, scale: Any, heads: int, by_page: bool) -> _Scales:
        values = np.asarray(1.0 if scale is None else scale, np.float64)
        if by_page and values.ndim == 1:
            values = values[:, None]
        rows = values.shape[0] if values.ndim == 2 else 1
        return cls(np.broadcast_to(values, (rows, heads)), by_page)

    def at(self, b: int, place: tuple[int, int]) -> Floats:
        """Those of each head for a key of sequence b."""
        row: Floats = self.values[(place[0] if self.by_page else b) if len(self.values) > 1 else 0]
        return row

    def times(self, x: Array, b: int, place: tuple[int, int]) -> Floats:
        """The key or value (heads, dim) at a place, scaled."""
        product: Floats = x * self.at(b, place)[:, None]
        return product


def _of_query_heads(scale: Array, heads: int, heads_kv: int) -> Array:
    """The scales of queries with one for each query head, where there is one for each head of keys."""
    if scale.ndim == 0 or scale.shape == (1,) or scale.shape[-1] == heads:
        return scale
    return np.repeat(scale, heads // heads_kv, axis=-1)


def _places(x: Array, cache: KVCache, b: int) -> list[tuple[int, int]]:
    """Where the keys of a sequence lie, as many as there is room for; of pages only those that may be used."""
    row = b if cache.batch_idx is None else int(cache.batch_idx[b])
    if cache.block_table is None:
        return [(row, j) for j in range(x.shape[1])]
    return [(int(page), j) for page in cache.block_table[row] for j in range(x.shape[1])]
