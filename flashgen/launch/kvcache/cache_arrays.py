"""The arrays that locate the keys and values of each sequence in a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.plan.cache import COUNTED_KEYS, PACKED_QUERIES, Q_SCALE, SCALES, cache_arrays
from flashgen.spec import AttentionSpec, KVCache

_PREFIX = "cache_"
#: Kernels compute with lengths, and with sums of two of them, in 32 bits.
_LENGTH_LIMIT = 2**30


class GivenArrays:
    """Extracts the arrays of a call's KVCache, by the names of their parameters."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        # Keyed by which arrays are None, and remembered, because this runs on every call.
        self._known: dict[tuple[bool, ...], tuple[tuple[str, ...], Callable[[KVCache], tuple[Any, ...]]]] = {}

    def of(self, cache: KVCache | None) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The names and the arrays of a call."""
        if not isinstance(cache, KVCache):
            raise ArgumentError(
                f"cache={show(cache)}: this kernel was built with cache={self._spec.cache!r}; pass "
                "cache=flashgen.KVCache(seqlens)"
            )
        pattern = (
            *(cache.seqlens is None, cache.batch_idx is None, cache.leftpad is None),
            *(cache.block_table is None, cache.cu_seqlens_q is None, cache.cu_seqlens_k is None),
            *(cache.k_scale is None, cache.v_scale is None),
        )
        found = self._known.get(pattern)
        if found is None:
            found = self._known[pattern] = self._find(cache)
        names, arrays = found
        return names, arrays(cache)

    def _find(self, cache: KVCache) -> tuple[tuple[str, ...], Callable[[KVCache], tuple[Any, ...]]]:
        if self._spec.cache == "paged" and cache.block_table is None:
            raise ArgumentError("cache.block_table=None, but this kernel was built with cache='paged'; pass the table")
        if self._spec.cache != "paged" and cache.block_table is not None:
            raise ArgumentError("cache.block_table is for kernels built with cache='paged'; leave it out, or build one")
        for name in SCALES:
            if self._spec.cache_dtype is None and getattr(cache, name) is not None:
                raise ArgumentError(
                    f"cache.{name} is for kernels built with cache_dtype='e4m3' or 'e5m2'; leave it out, or build one"
                )
            if self._spec.page_scales and getattr(cache, name) is None:
                raise ArgumentError(
                    f"cache.{name}=None, but this kernel was built with page_scales=True; pass a float32 for each page"
                )
        fields = {name: name.removeprefix(_PREFIX) for name in cache_arrays(self._spec)}
        names = tuple(name for name, field in fields.items() if getattr(cache, field) is not None)
        if len(names) < 2:
            return names, lambda given: tuple(getattr(given, fields[name]) for name in names)
        return names, attrgetter(*(fields[name] for name in names))


def capacity(arrays: Sequence[ArrayInfo], k: ArrayInfo) -> int:
    """The number of keys that a sequence has room for."""
    table = next((a for a in arrays if a.name == "block_table"), None)
    return k.shape[1] if table is None else table.shape[1] * k.shape[1]


def check_cache(arrays: Sequence[ArrayInfo], q: ArrayInfo, k: ArrayInfo) -> int:
    """The number of sequences. Raises ArgumentError for arrays that kernels cannot read, or that do not fit q and k."""
    starts = next((a for a in arrays if a.name == PACKED_QUERIES), None)
    batch = q.shape[0] if starts is None else max((starts.shape or (1,))[0] - 1, 0)
    problems = list(_problems(arrays, batch, q, k))
    if problems:
        raise ArgumentError("\n".join(problems))
    return batch


def is_packed(names: Iterable[str]) -> bool:
    """Whether the queries of a call are packed."""
    return PACKED_QUERIES in names


def _problems(arrays: Sequence[ArrayInfo], batch: int, q: ArrayInfo, k: ArrayInfo) -> Iterator[str]:
    arrays = [a for a in arrays if a.name not in (*SCALES, Q_SCALE)]
    has_rows = any(a.name == "cache_batch_idx" for a in arrays)
    table = next((a for a in arrays if a.name == "block_table"), None)
    for a in arrays:
        label, size = f"cache.{a.name.removeprefix(_PREFIX)}", batch + (a.name in (PACKED_QUERIES, COUNTED_KEYS))
        if a.device != q.device:
            yield f"{label} is on {a.where}, and q on {q.where}; move it there"
        if a.name == "block_table":
            if not is_ints(a, 2) or (not has_rows and a.shape[0] != batch):
                yield (
                    f"{label} is {a.dtype} of shape {a.shape}; pass a contiguous row of int32 page numbers for "
                    f"each of {batch} sequences"
                )
        elif not is_ints(a, 1) or a.shape != (size,):
            yield f"{label} is {a.dtype} of shape {a.shape}; pass {size} contiguous int32"
    if table is not None and len(table.shape) != 2:
        return
    if capacity(arrays, k) >= _LENGTH_LIMIT:
        yield f"the cache has room for {capacity(arrays, k)} keys of a sequence; it must be below 2^30"
    if not has_rows and table is None and k.shape[0] < batch:
        yield (
            f"k has {k.shape[0]} rows and q has batch {batch}; pass a cache with a row for each sequence, or "
            "name the row of each sequence in cache.batch_idx"
        )


def is_ints(a: ArrayInfo, rank: int) -> bool:
    """Whether an array is int32, of this rank, with contiguous rows."""
    known = a.dtype.rpartition(".")[2] == "int32" and len(a.shape) == rank
    return known and (a.shape[-1] <= 1 or a.strides[-1] == 1)
