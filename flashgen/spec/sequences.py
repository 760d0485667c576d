"""``Sequences``: where the sequences of a call of a kernel with ``AttentionSpec(varlen=True)`` begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashgen.common.checks import is_whole
from flashgen.common.show import show
from flashgen.errors import ArgumentError

#: No sequence is as long.
LENGTH_LIMIT = 2**30


# Not frozen: one is made for every call of some functions, and freezing takes most of the time of that.
@dataclass(slots=True, eq=False)
class Sequences:
    """Packed sequences: sequence i has queries ``cu_seqlens_q[i]`` up to ``cu_seqlens_q[i + 1]``, and keys likewise.

    q is (total_q, heads_q, head_dim), k and v are (total_k, heads_kv, ...); the arrays here are int32 on q's device.
    Offsets do not decrease, and no sequence is longer than ``max_seqlen``. Of sequence i only the first ``seqused[i]``
    rows take part, if that is given. Rows that take no part, those before the first offset and those behind the last
    one are never read, and results for them are zeros (of the log-sum-exp, minus infinity). Masks are those of each
    sequence, and so are q_len and k_len in expressions.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Any = None
    seqused_k: Any = None

    def __post_init__(self) -> None:
        len_q, len_k = self.max_seqlen_q, self.max_seqlen_k
        has_starts = self.cu_seqlens_q is not None and self.cu_seqlens_k is not None
        if has_starts and type(len_q) is type(len_k) is int and 0 <= len_q < LENGTH_LIMIT and 0 <= len_k < LENGTH_LIMIT:
            return
        problems = []
        for name in ("max_seqlen_q", "max_seqlen_k"):
            value = getattr(self, name)
            if not is_whole(value, 0, LENGTH_LIMIT - 1):
                problems.append(f"{name}={show(value)} is out of range; use a whole number from 0 to below 2^30")
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if getattr(self, name) is None:
                problems.append(f"{name}=None says not where sequences begin; pass an int32 array")
        if problems:
            raise ArgumentError("\n".join(f"sequences: {problem}" for problem in problems))
