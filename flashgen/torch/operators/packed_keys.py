"""Packed new keys, and rotary embedding of packed queries: the append kernel takes each row as a sequence of its own.

Where a row goes is computed on the device, so no call waits for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashgen.spec import KVCache, Rotary

#: The most sequences of one launch.
_MOST = 65535


class _Rows(NamedTuple):
    """Packed rows as sequences of one row each."""

    #: The sequence of each row, and its position in that sequence.
    sequence: Any
    step: Any
    #: Whether the row belongs to a sequence; rows outside every sequence do not.
    in_sequence: Any

    def positions(self, first: Any) -> Any:
        """Positions of the rows, where ``first`` has that of each sequence's first row."""
        return (first[self.sequence] + self.step).int()


def append_packed(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    cache: KVCache,
    rotary: Rotary | None,
    starts: Any,
    text: str,
    page_scales: bool,
) -> tuple[Any, KVCache]:
    """Appends k and v to a cache and rotates q, where either is packed; returns q, and the cache with the new lengths.

    ``starts`` says where the new keys of each sequence begin, if these are packed.
    """
    if starts is None:
        _append(q, k_cache, v_cache, k, v, cache, rotary, text, page_scales, rotates=False)
        counted = cache.seqlens + k.shape[1]
    else:
        _append_rows(q, k_cache, v_cache, k, v, cache, rotary, starts, text, page_scales)
        counted = cache.seqlens + starts.diff()
    if rotary is not None:
        q = _rotated(q, k_cache, v_cache, k, v, cache, rotary, text, page_scales)
    return q, replace(cache, seqlens=counted, appended=0)


def _append_rows(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    cache: KVCache,
    rotary: Rotary | None,
    starts: Any,
    text: str,
    page_scales: bool,
) -> None:
    rows = _rows_of(starts, k.shape[0])
    # The kernel leaves out keys that there is no room for.
    room = k_cache.shape[1] * (1 if cache.block_table is None else cache.block_table.shape[1])
    places = torch.where(rows.in_sequence, rows.positions(cache.seqlens), room).int()
    scales = _scales(cache, None if page_scales else rows.sequence)
    each = KVCache(places, _cache_rows(cache, rows), None, cache.block_table, **scales)
    if rotary is not None:
        first = cache.seqlens if rotary.positions is None else rotary.positions
        rotary = Rotary(rotary.cos, rotary.sin, rotary.interleaved, rows.positions(first), rotary.one_position)
    for part in _parts(k.shape[0]):
        _append(
            *(q, k_cache, v_cache, k[part, None], v[part, None]),
            *(_part(each, part, page_scales), _rotary_part(rotary, part), text, page_scales),
            rotates=False,
        )


def _rotated(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cache: KVCache, rotary: Rotary, text: str, page_scales: bool
) -> Any:
    if cache.cu_seqlens_q is None:
        return _append(q, k_cache, v_cache, k, v, cache, rotary, text, page_scales, rotates=True)
    rows = _rows_of(cache.cu_seqlens_q, q.shape[0])
    first = cache.seqlens if rotary.positions is None else rotary.positions
    positions = first[rows.sequence] if rotary.one_position else rows.positions(first)
    rotary = Rotary(rotary.cos, rotary.sin, rotary.interleaved, positions, rotary.one_position)
    # No key is written, but pages without scales have no kernel.
    scales = _scales(cache) if page_scales else {}
    each = KVCache(positions, _cache_rows(cache, rows), None, cache.block_table, **scales)
    rotated = [
        _append(
            *(q[part, None], k_cache, v_cache, k, v),
            *(_part(each, part, page_scales), _rotary_part(rotary, part), text, page_scales),
            rotates=True,
        )
        for part in _parts(q.shape[0])
    ]
    return torch.cat(rotated).squeeze(1) if rotated else q


def _append(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    cache: KVCache,
    rotary: Rotary | None,
    text: str,
    page_scales: bool,
    *,
    rotates: bool,
) -> Any:
    """One launch that rotates queries alone, or appends keys alone."""
    if rotates:
        k, v = (x.new_empty((q.shape[0], 0, *x.shape[-2:])) for x in (k, v))
    else:
        q = q.new_empty((k.shape[0], 0, *q.shape[-2:]))
    angles = (None, None, None) if rotary is None else (rotary.cos, rotary.sin, rotary.positions)
    style = (True, False) if rotary is None else (rotary.interleaved, rotary.one_position)
    places = cache.seqlens, cache.batch_idx, None, cache.block_table
    scales = cache.k_scale, cache.v_scale, page_scales
    return torch.ops.flashgen.cache_append(k_cache, v_cache, k, v, q, text, *places, *angles, *style, *scales)


def _rows_of(starts: Any, total: int) -> _Rows:
    rows = torch.arange(total, dtype=starts.dtype, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
    last = starts.shape[0] - 2
    belongs = (rows >= starts[0]) & (sequence <= last)
    return _Rows(sequence.clamp(max=last), rows - starts[sequence], belongs)


def _cache_rows(cache: KVCache, rows: _Rows) -> Any:
    """The row of the cache, or of the table of pages, of each row's sequence."""
    return (rows.sequence if cache.batch_idx is None else cache.batch_idx[rows.sequence]).int()


def _parts(count: int) -> list[slice]:
    return [slice(i, i + _MOST) for i in range(0, count, _MOST)]


def _part(cache: KVCache, part: slice, page_scales: bool) -> KVCache:
    scales = _scales(cache, None if page_scales else part)
    return KVCache(cache.seqlens[part], cache.batch_idx[part], None, cache.block_table, **scales)


def _scales(cache: KVCache, rows: Any = None) -> dict[str, Any]:
    """The scales of an 8-bit cache. Where each sequence has its own, those of these ``rows``."""
    found = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    if rows is None:
        return found
    return {name: x[rows] if x is not None and x.dim() == 2 else x for name, x in found.items()}


def _rotary_part(rotary: Rotary | None, part: slice) -> Rotary | None:
    if rotary is None:
        return None
    return Rotary(rotary.cos, rotary.sin, rotary.interleaved, rotary.positions[part], rotary.one_position)
