"""``KVCache`` and ``Rotary``: what calls of a kernel with ``AttentionSpec(cache=...)`` say of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashgen.common.checks import is_whole
from flashgen.common.show import show
from flashgen.errors import ArgumentError

#: No call splits the keys of a sequence into more parts.
MOST_SPLITS = 256
_MOST_KEYS = 2**30


# Not frozen, and neither is Rotary: they are made for every call, and freezing takes most of the time of that.
@dataclass(slots=True, eq=False)
class KVCache:
    """Where the keys and values of each sequence lie, and how many there are; arrays are int32 on q's device.

    A contiguous cache is k ``(rows, capacity, heads_kv, head_dim)`` and v likewise, and sequence i has row
    ``batch_idx[i]``, or row i. A paged one is k ``(pages, page_size, heads_kv, head_dim)``; key j of sequence i lies in
    page ``block_table[row, j // page_size]``, where a sequence's row of the table is chosen as in a contiguous cache.
    Pages may have any size. The table is never read beyond a sequence's length.

    Of sequence i the keys before ``seqlens[i]`` are there (without ``seqlens``: as many as there is room for; with
    ``cu_seqlens_k`` instead: as many as ``cu_seqlens_k[i + 1] - cu_seqlens_k[i]``), and of these all from
    ``leftpad[i]`` on. ``appended`` more were just put behind them by ``Kernel.append``. Masks count keys from
    ``leftpad`` on, and the last key is that of the last query.

    Queries are ``(batch, len_q, heads_q, head_dim)``, or with ``cu_seqlens_q`` those of sequence i are rows
    ``cu_seqlens_q[i]`` up to ``cu_seqlens_q[i + 1]`` of ``(total_q, heads_q, head_dim)``, at most ``max_seqlen_q``.
    Results for rows of no sequence are zeros (of the log-sum-exp, minus infinity).

    ``num_splits`` divides the keys over that many blocks, whose results are then combined; with 0 flashgen chooses
    the number. Results differ by rounding alone.

    ``k_scale`` and ``v_scale`` are for 8-bit caches: the numbers that the cache's elements are multiplied by, positive
    float32 on q's device. They have the shape ``()``, ``(1,)``, ``(heads_kv,)`` or ``(batch, heads_kv)``; without them
    they are 1. Kernels with ``page_scales=True`` take ``(pages,)`` or ``(pages, heads_kv)``.

    With ``batch_invariant=True`` the result of a sequence has the same bits whatever else is in the batch: the keys are
    divided at fixed places. ``num_splits`` must then be 0.
    """

    seqlens: Any = None
    batch_idx: Any = None
    leftpad: Any = None
    block_table: Any = None
    appended: int = 0
    num_splits: int = 0
    cu_seqlens_q: Any = None
    max_seqlen_q: int = 0
    cu_seqlens_k: Any = None
    batch_invariant: bool = False
    k_scale: Any = None
    v_scale: Any = None

    def __post_init__(self) -> None:
        appended, splits, longest = self.appended, self.num_splits, self.max_seqlen_q
        are_ints = type(appended) is type(splits) is type(longest) is int
        # Only a whole number is asked whether it is 0: an array would raise an error of its own.
        has_lengths = are_ints and (self.seqlens is not None or not appended)
        plain = has_lengths and self.cu_seqlens_q is self.cu_seqlens_k is None and self.batch_invariant is False
        if plain and 0 <= appended <= _MOST_KEYS and 0 <= splits <= MOST_SPLITS and not longest:
            return
        problems = []
        for name, most in (("appended", _MOST_KEYS), ("num_splits", MOST_SPLITS), ("max_seqlen_q", _MOST_KEYS)):
            value = getattr(self, name)
            if not is_whole(value, 0, most):
                problems.append(f"{name}={show(value)} is out of range; use a whole number from 0 to {most}")
        if type(self.batch_invariant) is not bool:
            problems.append(f"batch_invariant={show(self.batch_invariant)} is not a bool; use True or False")
        elif self.batch_invariant and splits != 0:
            problems.append(f"num_splits={show(splits)} depends on the batch; leave it out with batch_invariant=True")
        if is_whole(appended, 1, _MOST_KEYS) and self.seqlens is None:
            problems.append("appended keys lie behind those that were there; say in seqlens how many these were")
        if self.seqlens is not None and self.cu_seqlens_k is not None:
            problems.append("seqlens and cu_seqlens_k both say how many keys there are; pass one of them")
        if is_whole(longest, 0, _MOST_KEYS) and (self.cu_seqlens_q is None) != (not longest):
            problems.append(f"cu_seqlens_q and max_seqlen_q={show(longest)} go together; pass both, or neither")
        if problems:
            raise ArgumentError("\n".join(f"cache: {problem}" for problem in problems))


@dataclass(slots=True, eq=False)
class Rotary:
    """Rotary position embedding: rotates the first ``2 * cos.shape[1]`` elements of each head in pairs.

    cos and sin are ``(positions, rotary_dim / 2)`` in the kernel's dtype. ``interleaved=True`` pairs elements 2i and
    2i + 1, and ``False`` (as in GPT-NeoX) i and i + rotary_dim / 2. The first new key, and the first query, is at
    position ``positions[i]``, or if that is left out ``seqlens[i]``. Further keys are at the positions after it, and so
    are further queries unless ``one_position=True``. Positions beyond the last of the table are taken for the last.
    """

    cos: Any
    sin: Any
    interleaved: bool = True
    positions: Any = None
    one_position: bool = False

    def __post_init__(self) -> None:
        for name in ("cos", "sin"):
            if getattr(self, name) is None:
                raise ArgumentError(f"rotary: {name}=None is no table of angles; pass an array in the kernel's dtype")
        for name in ("interleaved", "one_position"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise ArgumentError(f"rotary: {name}={show(value)} is not a bool; use True or False")
