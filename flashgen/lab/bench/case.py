"""The problems of a bench, and what attention gives for one head of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashgen.dtypes import CACHE_DTYPES, DTYPES
from flashgen.spec import AttentionSpec, causal, full, window
from flashgen.spec.attention import CacheKind

Pass = Literal["forward", "backward"]
#: Queries whose scores are in memory at once.
_CHUNK = 1024
#: Rows of each head that are compared with those of another implementation.
_SAMPLED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: queries and keys are equally long, or, with ``new_tokens``, few queries attend to a cache."""

    pass_: Pass
    dtype: str
    head_dim: int
    causal: bool
    len: int
    batch: int
    heads: int
    #: Queries of each sequence, the last of its positions, where keys and values are a cache; else 0.
    new_tokens: int = 0
    heads_kv: int = 0
    #: 8-bit elements of flashgen's cache. Keys and values are such numbers, which other libraries read in ``dtype``.
    cache_dtype: str | None = None
    #: Keys of a page, where flashgen's cache is in pages.
    page_size: int = 64
    #: Whether each page has scales, which are 1 here.
    page_scales: bool = False
    #: How many keys before its own position a query attends to; None: all.
    window: int | None = None
    #: Whether the caches of sequences are full up to even shares of ``len``; the last one is full.
    ragged: bool = False

    @property
    def is_decode(self) -> bool:
        """Whether keys and values are a cache."""
        return self.new_tokens > 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        if not self.ragged:
            return (self.len,) * self.batch
        return tuple(max(self.queries, -(-self.len * (i + 1) // self.batch)) for i in range(self.batch))

    @property
    def queries(self) -> int:
        """Queries of each sequence."""
        return self.new_tokens or self.len

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads_kv or self.heads

    def spec_with(self, cache: CacheKind) -> AttentionSpec:
        """The spec of a problem with a cache."""
        return replace(self.spec, cache=cache, cache_dtype=self.cache_dtype, page_scales=self.page_scales)

    @property
    def spec(self) -> AttentionSpec:
        """The spec of the problem."""
        mask = causal() if self.causal else full()
        if self.window is not None:
            mask = window(self.window, 0)
        direction = "both" if self.pass_ == "backward" else "forward"
        return AttentionSpec(self.head_dim, dtype=self.dtype, mask=mask, direction=direction)  # type: ignore[arg-type]

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key. A causal mask halves them, as in FlashAttention's papers."""
        share = 0.5 if self.causal and not self.is_decode else 1.0
        return float(self.queries) * self._read_keys * self.heads * share

    @property
    def flops(self) -> float:
        """As the papers count: two matrix products forward, and five backward."""
        return self.pairs * self.head_dim * (4.0 if self.pass_ == "forward" else 10.0)

    @property
    def argument_bytes(self) -> int:
        """Bytes of Q, K and V, and backward also of O, dO and L."""
        array = self.batch * self.queries * self.heads * self.head_dim * DTYPES[self.dtype].bytes
        if self.pass_ == "forward":
            return array + self._kv_bytes(self.batch * self.len)
        return 5 * array + 4 * self.batch * self.len * self.heads

    @property
    def kv_bytes(self) -> int:
        """Bytes that a step reads of K and V in ``dtype``."""
        return self._kv_bytes(self._read_keys)

    @property
    def cache_bytes(self) -> int:
        """Bytes that a step reads of K and V in flashgen's cache."""
        if self.cache_dtype is None:
            return self.kv_bytes
        return self.kv_bytes // DTYPES[self.dtype].bytes * CACHE_DTYPES[self.cache_dtype].bytes

    @property
    def _read_keys(self) -> int:
        """Keys of all sequences that some query attends to."""
        most = self.len if self.window is None else self.window + self.queries
        return sum(min(length, most) for length in self.lengths)

    def _kv_bytes(self, keys: int) -> int:
        return 2 * keys * self.kv_heads * self.head_dim * DTYPES[self.dtype].bytes

    @property
    def mask(self) -> str:
        """``causal``, ``full``, or the window."""
        if self.window is not None:
            return f"window {self.window}"
        return "causal" if self.causal else "full"

    @property
    def title(self) -> str:
        """The case without its length, batch size and heads."""
        tokens = f", {self.new_tokens} new tokens, H={self.heads}/{self.kv_heads}" if self.is_decode else ""
        dtype = self.dtype if self.cache_dtype is None else f"{self.dtype}, cache of {self.cache_dtype}"
        tokens += ", ragged" if self.ragged else ""
        dtype += ", scales of pages" if self.page_scales else ""
        return f"{'decode' if self.is_decode else self.pass_}, {dtype}, D={self.head_dim}, {self.mask}{tokens}"

    def __str__(self) -> str:
        heads = "" if self.is_decode else f", H={self.heads}"
        return f"{self.title}, N={self.len}, B={self.batch}{heads}"

    def inputs(self) -> Inputs:
        """Normal random numbers; equal cases have equal arrays, and so have the two masks and passes."""
        random = np.random.default_rng([self.head_dim, self.len])
        queries = (self.batch, self.queries, self.heads, self.head_dim)
        keys = (self.batch, self.len, self.kv_heads, self.head_dim)
        dtype = DTYPES[self.dtype].numpy()
        shapes = (queries, keys, keys, queries)
        q, k, v, do = (random.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes)
        if self.cache_dtype is not None:
            k, v = (x.astype(CACHE_DTYPES[self.cache_dtype].numpy()).astype(dtype) for x in (k, v))
        return Inputs(q, k, v, do)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Arrays (batch, length, heads, head_dim): NumPy's, or copies of them on a device."""

    q: Any
    k: Any
    v: Any
    do: Any


def expected(case: Case, inputs: Inputs) -> tuple[NDArray[np.float32], ...]:
    """O, or dQ, dK and dV, of the last head of the last sequence, in float32."""
    return _one_head(case, inputs, -1, -1)


def expected_all(case: Case, inputs: Inputs) -> tuple[NDArray[np.float32], ...]:
    """O, or dQ, dK and dV, of every head, in float32 by NumPy."""
    made = [np.empty(inputs.q.shape, np.float32) for _ in range(1 if case.pass_ == "forward" else 3)]
    for b, h in np.ndindex(case.batch, case.heads):
        for array, part in zip(made, _one_head(case, inputs, b, h), strict=True):
            array[b, :, h] = part
    return tuple(made)


def _one_head(case: Case, inputs: Inputs, b: int, h: int) -> tuple[NDArray[np.float32], ...]:
    group = case.heads // case.kv_heads
    q, do = (np.asarray(x[b, :, h], np.float32) for x in (inputs.q, inputs.do))
    k, v = (np.asarray(x[b, :, h if h < 0 else h // group], np.float32) for x in (inputs.k, inputs.v))
    scale = np.float32(case.spec.default_scale)
    parts, dk, dv = [], np.zeros_like(k), np.zeros_like(v)
    for first in range(0, case.queries, _CHUNK):
        rows = slice(first, min(first + _CHUNK, case.queries))
        p = _probabilities(case, q[rows] @ k.T * scale, first)
        if case.pass_ == "forward":
            parts.append(p @ v)
            continue
        dp = do[rows] @ v.T
        ds = p * (dp - (dp * p).sum(axis=1, keepdims=True)) * scale
        parts.append(ds @ k)
        dk += ds.T @ q[rows]
        dv += p.T @ do[rows]
    made = np.concatenate(parts)
    return (made,) if case.pass_ == "forward" else (made, dk, dv)


def _probabilities(case: Case, scores: NDArray[np.float32], first: int) -> NDArray[np.float32]:
    own = np.arange(first, first + len(scores))[:, None] + case.len - case.queries
    keys = np.arange(case.len)[None, :]
    if case.causal:
        scores[keys > own] = -np.inf
    if case.window is not None:
        scores[keys < own - case.window] = -np.inf
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


def last_head(array: Any) -> NDArray[np.float32]:
    """The part of a result that ``expected`` is compared with."""
    return np.asarray(array[-1, :, -1], np.float32)


def sampled(array: Any) -> NDArray[np.float32]:
    """Some rows of every head."""
    step = max(1, array.shape[1] // _SAMPLED_ROWS)
    return np.asarray(array[:, ::step], np.float32)


def distance(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The relative error of an array (Frobenius norm); infinite where one of them is not finite."""
    if got.shape != wanted.shape:
        return float("inf")
    error = float(np.linalg.norm(got.astype(np.float64) - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))
    return error if np.isfinite(error) else float("inf")
