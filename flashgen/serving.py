"""What an engine's attention backend calls: ``plan`` once a step, then ``append`` and ``run`` in every layer.

An engine batches sequences in different phases: some decode a token, others are in prefill. Keys and values lie in
pages. Four tensors describe a step, here under vLLM's names:

- ``query_start_loc`` ``(B + 1,)``: the new tokens of sequence i are rows ``query_start_loc[i]`` up to
  ``query_start_loc[i + 1]`` of q, k and v, which are ``(tokens, heads, head_dim)``;
- ``seq_lens`` ``(B,)``: how many keys each sequence has, the new ones included;
- ``block_table`` ``(B, n)``: the pages of each sequence; entries beyond its length are never read;
- ``slot_mapping`` ``(tokens,)``: where each new key goes: slot s is row ``s % page_size`` of page ``s // page_size``.
  A negative slot is padding, and nothing is written for it.

Caches are ``(pages, page_size, heads_kv, head_dim)`` with any strides whose last one is 1. Only kernels read the
tensors, so no call waits for the GPU. There are no gradients.

Caches may be in float8 with 16-bit q, k and v. ``append`` and ``run`` then take the ``k_scale`` and ``v_scale`` of
their layer, as in ``flashgen.KVCache``: one number or one for each head, which all sequences share, or with
``page_scales`` one for each page, or each page and head. q may also be in float8, with a ``q_scale``. So may k and v,
which have the scales of the cache already: ``append`` copies them.

Caches may also hold latent vectors, whose values are part of the keys (DeepSeek). ``run`` then takes ``qv``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashgen.common.checks import is_whole
from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.spec import KVCache, causal
from flashgen.torch.cached import attend_cached
from flashgen.torch.eight_bits import is_eight_bit
from flashgen.torch.mask_and_score import program_of
from flashgen.torch.operators.kvcache import put_into_cache
from flashgen.torch.program import Program, limits_of
from flashgen.torch.scales import NO_SCALES, Scales, out_dtype_of, scales_of

__all__ = ["Group", "Step", "append", "plan", "run"]

_CAUSAL = causal()
#: The kernel that appends belongs to a program, and a program has a mask. Appending ignores it.
_APPENDING = Program(limits_of(_CAUSAL))
#: The most rows of one launch that appends.
_MAX_ROWS = 65535
_MAX_INT32 = 2**31 - 1
#: The arrays of a ``KVCache`` that a step has, and the arguments of ``plan`` that they come from.
_ARRAYS = {
    "seqlens": "seq_lens",
    "batch_idx": "table_rows",
    "block_table": "block_table",
    "cu_seqlens_q": "query_start_loc",
}


@dataclass(frozen=True)
class Group:
    """Consecutive sequences whose attention one call computes."""

    #: Their rows among those of the step.
    first: int
    last: int
    #: Queries of each sequence if all have the same number; 0 if they are packed.
    each: int
    cache: KVCache


@dataclass(frozen=True)
class Step:
    """A planned step, which all layers with caches of one kind share."""

    num_tokens: int
    groups: tuple[Group, ...]
    #: Where new keys go. The append kernel sees each new token as a sequence with one page.
    slots: KVCache | None


def plan(
    query_start_loc: Any,
    seq_lens: Any,
    block_table: Any,
    slot_mapping: Any = None,
    *,
    num_tokens: int,
    max_query_len: int,
    page_size: int = 0,
    num_decodes: int = 0,
    decode_query_len: int = 1,
    table_rows: Any = None,
    batch_invariant: bool = False,
    into: Step | None = None,
) -> Step:
    """Describes a step. ``num_tokens`` and ``max_query_len`` are known on the host; nothing is read from the device.

    The decode kernel runs the first ``num_decodes`` sequences. Each must have ``decode_query_len`` new tokens. A
    padding sequence among them also has ``decode_query_len`` rows, and its ``seq_lens`` is 0. With ``num_decodes=0``,
    the decode kernel runs all sequences if ``max_query_len`` is small enough. ``table_rows`` ``(B,)`` names the row of
    ``block_table`` of each sequence. ``slot_mapping`` and ``page_size`` are for ``append``. With ``batch_invariant``
    the result of a sequence has the same bits in any batch.

    A CUDA graph of the layers reads the arrays of the step that it captured. Pass that step as ``into`` before a
    replay: ``plan`` then writes the new step into those arrays. Both steps must have the same numbers of sequences,
    decodes and tokens, and ``max_query_len`` must not be above that of the captured step. Alternatively, capture
    the call of ``plan``, too.
    """
    _check_counts(num_tokens=num_tokens, max_query_len=max_query_len, page_size=page_size, num_decodes=num_decodes)
    count = _sequences(query_start_loc, seq_lens, block_table, table_rows)
    if (
        num_decodes > count
        or not is_whole(decode_query_len, 1, _MAX_INT32)
        or num_decodes * decode_query_len > num_tokens
    ):
        raise ArgumentError(
            f"num_decodes={num_decodes} and decode_query_len={show(decode_query_len)} do not go with {count} sequences "
            f"and num_tokens={num_tokens}; pass how many sequences come first with decode_query_len new tokens each"
        )
    if num_tokens and max_query_len < (decode_query_len if num_decodes else 1):
        least = f"decode_query_len={decode_query_len}" if num_decodes else "1"
        raise ArgumentError(
            f"max_query_len={max_query_len} is below {least}; pass how many new tokens a sequence has at most"
        )
    locations = [_ints(seq_lens), _ints(table_rows), _ints(block_table)]
    groups = []
    if into is not None and not isinstance(into, Step):
        raise ArgumentError(f"into={show(into)} is not a step; pass one that plan has returned")
    # A captured step whose queries are packed stays one.
    is_packed = into is not None and any(not group.each and group.first == 0 for group in into.groups)
    if not num_decodes and max_query_len == 1 and count == num_tokens and not is_packed:
        num_decodes, decode_query_len = count, 1
    if num_decodes == count and num_decodes * decode_query_len < num_tokens:
        # The other rows belong to no sequence. Packed queries may have such rows, and their results are zeros.
        num_decodes = 0
    first = num_decodes * decode_query_len
    if first:
        groups.append(Group(0, first, decode_query_len, _cache(locations, 0, num_decodes, None, 0, batch_invariant)))
    if first < num_tokens:
        starts = _ints(query_start_loc)
        starts = starts[num_decodes:] - first if first else starts
        cache = _cache(locations, num_decodes, count, starts, max_query_len, batch_invariant)
        groups.append(Group(first, num_tokens, 0, cache))
    step = Step(num_tokens, tuple(groups), _slots(slot_mapping, num_tokens, page_size))
    return step if into is None else _written(step, into)


def append(
    step: Step,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    page_scales: bool = False,
) -> None:
    """Writes the new keys and values of a step, ``(tokens, heads_kv, head_dim)``, into the cache."""
    if step.slots is None:
        raise ArgumentError("the step was planned without slot_mapping and page_size; pass them to plan")
    for name, x, rank in (("k", k, 3), ("v", v, 3), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4)):
        _check_rank(name, x, rank, step.num_tokens if rank == 3 else 0)
    scales = scales_of(k_scale, v_scale, page_scales)
    for cache, rows in _portions(step.slots, step.num_tokens):
        put_into_cache(k_cache, v_cache, k[rows, None], v[rows, None], cache, _APPENDING, scales)


def run(
    step: Step,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    mask: Any = _CAUSAL,
    score: Any = None,
    scale: float | None = None,
    out: Any = None,
    return_lse: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    page_scales: bool = False,
    q_scale: Any = None,
    out_dtype: Any = None,
    qv: Any = None,
) -> Any:
    """Attention of the step's queries ``(tokens, heads, head_dim)`` to the caches: ``out``, or ``(out, lse)``.

    Rows of q beyond ``num_tokens`` are padding. The result has ``num_tokens`` rows and is written into the first rows
    of ``out``, where one is given. ``lse`` is ``(heads, tokens)``. Rows of no sequence get zeros, and minus infinity in
    ``lse``. ``mask`` and ``score`` are those of ``flashgen.attention``. They align the last query of a sequence with
    its last key. ``q_scale`` and ``out_dtype`` are for q in float8 and as in ``flashgen.attention``; all sequences
    share the scale. ``qv`` ``(tokens, heads, head_dim_v)`` is for caches of latent vectors, whose values are part of
    the keys (DeepSeek), and as in ``flashgen.attention``.
    """
    for name, x, rank in (("q", q, 3), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4)):
        _check_rank(name, x, rank, step.num_tokens if rank == 3 else 0)
    if qv is not None:
        _check_rank("qv", qv, 3, step.num_tokens)
    program, captured = program_of(mask, score, q, None, None)
    scales = scales_of(k_scale, v_scale, page_scales, q_scale, out_dtype)
    more: dict[str, Any] = {"return_lse": return_lse, "scales": scales, "qv": qv}
    return attend_step(step, q, k_cache, v_cache, program, captured, scale, out, **more)


def attend_step(
    step: Step,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    program: Program,
    captured: Sequence[Any],
    scale: float | None,
    out: Any = None,
    *,
    return_lse: bool = False,
    scales: Scales = NO_SCALES,
    qv: Any = None,
) -> Any:
    """Like ``run``, for a mask and a score that are already a program."""
    outs, lses = [], []
    for group in step.groups:
        rows, rows_qv = _rows(group, q), None if qv is None else _rows(group, qv)
        part, lse = attend_cached(rows, k_cache, v_cache, group.cache, program, captured, scale, scales, rows_qv)
        outs.append(part.flatten(0, 1) if group.each else part)
        if return_lse:
            lses.append(lse.transpose(0, 1).flatten(1) if group.each else lse)
    if out is not None:
        for group, part in zip(step.groups, outs, strict=True):
            out[group.first : group.last].copy_(part)
        found = out[: step.num_tokens]
    else:
        dtype = out_dtype_of(scales.out_dtype) if is_eight_bit(q) else q.dtype
        found = _joined(outs, 0, q.new_empty((0, q.shape[1], v_cache.shape[-1]), dtype=dtype))
    return (found, _joined(lses, 1, q.new_empty((q.shape[1], 0), dtype=torch.float32))) if return_lse else found


def _rows(group: Group, queries: Any) -> Any:
    """The queries of a group: packed, or if all sequences have the same number ``(sequences, number, heads, dim)``."""
    is_all = group.first == 0 and group.last == queries.shape[0]
    rows = queries if is_all else queries[group.first : group.last]  # a slice takes a microsecond
    return rows.view(-1, group.each, *rows.shape[1:]) if group.each else rows


def _joined(parts: list[Any], axis: int, nothing: Any) -> Any:
    if not parts:
        return nothing
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _cache(locations: list[Any], first: int, last: int, starts: Any, longest: int, batch_invariant: bool) -> KVCache:
    """The cache of the sequences from ``first`` up to ``last``."""
    seqlens, rows, table = locations
    if rows is None:
        table = table[first:last]
    else:
        rows = rows[first:last]
    return KVCache(
        seqlens[first:last],
        rows,
        block_table=table,
        cu_seqlens_q=starts,
        max_seqlen_q=longest,
        batch_invariant=batch_invariant,
    )


def _slots(slot_mapping: Any, num_tokens: int, page_size: int) -> KVCache | None:
    """Where new keys go: to the kernel each row is a sequence with one page, whose length is the row's place in it."""
    if slot_mapping is None:
        return None
    _check_rank("slot_mapping", slot_mapping, 1, num_tokens)
    if not page_size:
        raise ArgumentError("slot_mapping needs page_size; pass how many keys a page has")
    slots = slot_mapping[:num_tokens]
    # The kernel drops keys beyond the page, so a negative slot gets a place there.
    used = torch.where(slots < 0, page_size, slots % page_size)
    return KVCache(used.int(), block_table=(slots.clamp(min=0) // page_size).int()[:, None])


def _portions(slots: KVCache, count: int) -> Iterator[tuple[KVCache, slice]]:
    """The slots in portions that one launch can append."""
    if count <= _MAX_ROWS:
        yield slots, slice(0, count)
        return
    for first in range(0, count, _MAX_ROWS):
        rows = slice(first, min(first + _MAX_ROWS, count))
        yield replace(slots, seqlens=slots.seqlens[rows], block_table=slots.block_table[rows]), rows


def _written(step: Step, into: Step) -> Step:
    """The earlier step ``into``, after the arrays of ``step`` are copied into its arrays."""
    if _counts(step) != _counts(into):
        raise ArgumentError(
            "into was planned for other numbers of sequences, decodes or tokens; plan this step without into, and "
            "capture it"
        )
    pairs = list(zip(_caches(step), _caches(into), strict=True))
    for cache, other in pairs:
        _check_fits(cache, other)
    for cache, other in pairs:
        for name in _ARRAYS:
            array, place = getattr(cache, name), getattr(other, name)
            if array is not None and array.data_ptr() != place.data_ptr():
                place.copy_(array)
    return into


def _counts(step: Step) -> Any:
    return step.num_tokens, [(g.first, g.last, g.each) for g in step.groups], step.slots is None


def _check_fits(cache: KVCache, other: KVCache) -> None:
    """ArgumentError if a graph that captured ``other`` cannot run ``cache``: a replay changes nothing but arrays."""
    if cache.max_seqlen_q > other.max_seqlen_q:
        raise ArgumentError(
            f"max_query_len={cache.max_seqlen_q} is above the {other.max_seqlen_q} that into was planned with; plan "
            "the step to capture with the largest one"
        )
    if cache.batch_invariant is not other.batch_invariant:
        raise ArgumentError(
            f"batch_invariant={cache.batch_invariant} differs from that of into, which is {other.batch_invariant}; "
            "plan this step without into, and capture it"
        )
    for name in _ARRAYS:
        shape, captured = _shape(getattr(cache, name)), _shape(getattr(other, name))
        if shape != captured:
            raise ArgumentError(
                f"{_ARRAYS[name]} has shape {shape}, and that of into is {captured}; plan this step without into, and "
                "capture it"
            )


def _shape(x: Any) -> tuple[int, ...] | None:
    return None if x is None else tuple(x.shape)


def _caches(step: Step) -> list[KVCache]:
    return [group.cache for group in step.groups] + ([] if step.slots is None else [step.slots])


def _ints(x: Any) -> Any:
    return x if x is None or x.dtype == torch.int32 else x.int()


def _sequences(starts: Any, seq_lens: Any, table: Any, rows: Any) -> int:
    """How many sequences there are, if the tensors agree."""
    _check_rank("seq_lens", seq_lens, 1)
    count = int(seq_lens.shape[0])
    _check_rank("query_start_loc", starts, 1, count + 1, exact=True)
    _check_rank("block_table", table, 2, 0 if rows is not None else count, exact=rows is None)
    if rows is not None:
        _check_rank("table_rows", rows, 1, count, exact=True)
    return count


def _check_rank(name: str, x: Any, rank: int, rows: int = 0, *, exact: bool = False) -> None:
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name} is a {type(x).__qualname__}; pass a torch.Tensor")
    if x.dim() != rank or x.shape[0] < rows or (exact and x.shape[0] != rows):
        wanted = f" and {'' if exact else 'at least '}{rows} rows" if rows or exact else ""
        raise ArgumentError(f"{name} has shape {tuple(x.shape)}; it must have rank {rank}{wanted}")


def _check_counts(**counts: object) -> None:
    for name, value in counts.items():
        if not is_whole(value, 0, _MAX_INT32):
            raise ArgumentError(f"{name}={show(value)} is out of range; use a whole number from 0 to {_MAX_INT32}")
