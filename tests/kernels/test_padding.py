"""Rows of packed arrays that belong to no sequence: zeros in O, dQ, dK and dV, minus infinity in the log-sum-exp."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.launch.call.offsets import Offsets
from flashgen.launch.variant import Variant
from flashgen.render import KernelSource
from tests.drawn import diagonal

TOTAL_Q, TOTAL_K = 50, 90
#: Rows before the first sequence, between none, and after the last; the second sequence is empty.
STARTS_Q, STARTS_K = (3, 20, 20, 41), (7, 40, 45, 75)


def int32(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def inside(starts: tuple[int, ...], total: int, used: tuple[int, ...] | None = None) -> Any:
    """Which rows belong to a sequence, and are used."""
    found = np.zeros(total, bool)
    for i, (first, end) in enumerate(itertools.pairwise(starts)):
        found[first : end if used is None else first + used[i]] = True
    return found


def arrays(dtype: Any, dim: int, dim_v: int) -> list[Any]:
    random = np.random.default_rng(0)
    shapes = ((TOTAL_Q, 4, dim), (TOTAL_K, 2, dim), (TOTAL_K, 2, dim_v), (TOTAL_Q, 4, dim_v))
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def check(rows: Any, results: tuple[Any, ...], expected: float) -> None:
    for array in results:
        assert np.isfinite(array[rows]).all()
        assert (array[~rows] == expected).all()


@pytest.mark.parametrize(
    ("kind", "deterministic"), diagonal([("fp32", 16, 16), ("fp16", 64, 32), ("fp16", 5, 7)], [False, True])
)
def test_rows_of_no_sequence_are_zeros(kind: tuple[str, int, int], deterministic: bool) -> None:
    dtype, dim, dim_v = kind
    spec = fg.AttentionSpec(
        dim, head_dim_v=dim_v, dtype=dtype, mask=fg.causal(), varlen=True, deterministic=deterministic
    )
    kernel = fg.build(spec, arch="sm_80", target="emulator")
    q, k, v, do = arrays("float32" if dtype == "fp32" else "float16", dim, dim_v)
    sequences = fg.Sequences(int32(*STARTS_Q), int32(*STARTS_K), 21, 33)
    o, lse = kernel(q, k, v, sequences=sequences)
    queries, keys = inside(STARTS_Q, TOTAL_Q), inside(STARTS_K, TOTAL_K)
    check(queries, (o,), 0.0)
    check(queries, (lse.T,), -np.inf)
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, sequences=sequences)
    check(queries, (dq,), 0.0)
    check(keys, (dk, dv), 0.0)


def test_rows_that_are_not_used_and_rows_of_no_sequence_are_zeros_together() -> None:
    used_q, used_k = (10, 0, 21), (33, 5, 0)
    kernel = fg.build(fg.AttentionSpec(16, dtype="fp32", varlen=True), arch="sm_80", target="emulator")
    q, k, v, do = arrays("float32", 16, 16)
    sequences = fg.Sequences(int32(*STARTS_Q), int32(*STARTS_K), 21, 33, int32(*used_q), int32(*used_k))
    o, lse = kernel(q, k, v, sequences=sequences)
    queries, keys = inside(STARTS_Q, TOTAL_Q, used_q), inside(STARTS_K, TOTAL_K, used_k)
    gradients = kernel.backward(do, q, k, v, o, lse, sequences=sequences)
    assert (o[~queries] == 0).all()
    assert (lse.T[~queries] == -np.inf).all()
    assert (gradients[0][~queries] == 0).all()
    assert all((x[~keys] == 0).all() and np.isfinite(x).all() for x in gradients[1:])


@pytest.mark.parametrize("starts", [(0,), (0, 0, 0)])
def test_without_any_sequence_or_any_row_in_one_all_rows_are_zeros(starts: tuple[int, ...]) -> None:
    kernel = fg.build(fg.AttentionSpec(16, dtype="fp32", varlen=True), arch="sm_80", target="emulator")
    q, k, v, do = arrays("float32", 16, 16)
    sequences = fg.Sequences(int32(*starts), int32(*starts), 0, 0)
    o, lse = kernel(q, k, v, sequences=sequences)
    assert not o.any()
    assert (lse == -np.inf).all()
    assert not any(x.any() for x in kernel.backward(do, q, k, v, o, lse, sequences=sequences))


@pytest.mark.parametrize("starts", [(30, 10, 20, 60), (-5, 10, 200, 12), (2**31 - 1, -(2**31), 0, 2**31 - 1)])
def test_garbage_on_a_device_leaves_no_row_of_clear_gaps_out(
    monkeypatch: pytest.MonkeyPatch, starts: tuple[int, ...]
) -> None:
    """Nothing checks values on a device. Here no sequence has rows, so clear_gaps writes them all."""
    monkeypatch.setattr(Offsets, "check", lambda *_: None)
    kernel = fg.build(fg.AttentionSpec(16, dtype="fp32", varlen=True), arch="sm_80", target="emulator")
    q, k, v, do = arrays("float32", 16, 16)
    sequences = fg.Sequences(int32(*starts), int32(*starts), 0, 0)
    o, lse = kernel(q, k, v, sequences=sequences)
    assert not o.any()
    assert (lse == -np.inf).all()
    assert not any(x.any() for x in kernel.backward(do, q, k, v, o, lse, sequences=sequences))


@pytest.mark.parametrize("longest", [5, 21])
def test_rows_beyond_the_longest_sequence_are_zeros(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    monkeypatch.setattr(Offsets, "check", lambda *_: None)
    kernel = fg.build(fg.AttentionSpec(16, dtype="fp32", varlen=True), arch="sm_80", target="emulator")
    q, k, v, _ = arrays("float32", 16, 16)
    o, lse = kernel(q, k, v, sequences=fg.Sequences(int32(*STARTS_Q), int32(*STARTS_K), longest, 33))
    lengths = tuple(min(b - a, longest) for a, b in itertools.pairwise(STARTS_Q))
    queries = inside(STARTS_Q, TOTAL_Q, lengths)
    check(queries, (o,), 0.0)
    check(queries, (lse.T,), -np.inf)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_packed_queries_of_a_cache_leave_no_row_unwritten(num_splits: int) -> None:
    spec = fg.AttentionSpec(16, dtype="fp32", direction="forward", cache="contiguous")
    kernel = fg.build(spec, arch="sm_80", target="emulator")
    random = np.random.default_rng(0)
    q = random.standard_normal((TOTAL_Q, 4, 16)).astype(np.float32)
    k, v = random.standard_normal((2, 3, 200, 2, 16)).astype(np.float32)
    cache = fg.KVCache(int32(200, 70, 0), cu_seqlens_q=int32(*STARTS_Q), max_seqlen_q=21, num_splits=num_splits)
    o, lse = kernel(q, k, v, cache=cache)
    queries = inside(STARTS_Q, TOTAL_Q)
    assert (o[~queries] == 0).all()
    assert (lse.T[~queries] == -np.inf).all()
    assert np.isfinite(o).all()


def test_many_sequences_are_searched_warp_by_warp() -> None:
    """More sequences than a warp has lanes, with rows behind the last."""
    starts = int32(*range(1, 72))
    kernel = fg.build(
        fg.AttentionSpec(16, dtype="fp32", varlen=True, direction="forward"), arch="sm_80", target="emulator"
    )
    q = np.ones((90, 1, 16), np.float32)
    o, lse = kernel(q, q, q, sequences=fg.Sequences(starts, starts, 1, 1))
    queries = inside(tuple(range(1, 72)), 90)
    assert (o[queries] == 1).all()
    assert np.isfinite(lse.T[queries]).all()
    check(queries, (o,), 0.0)
    check(queries, (lse.T,), -np.inf)


#: Planted in clear_gaps, each shows in one of the results of a call.
BUGS = {
    "rows before the first sequence": ("if (gap == 0) return 0;", "if (gap == 0) return starts[0];"),
    "rows behind the last sequence": (
        "gap < sequences ? starts[gap] : total",
        "starts[gap < sequences ? gap : sequences]",
    ),
    "the log-sum-exp": ("= -kInfinity;", "= 0.0f;"),
    "heads behind the first": ("static_cast<i64>(p.heads_q) * kConfig.head_dim_v", "kConfig.head_dim_v"),
    "dV": ("(p.dv, rows", "(p.dk, rows"),
    "the last lane": ("warp_ballot(own.size() > 0)", "(warp_ballot(own.size() > 0) & 0x7u)"),
}


def wrong_rows(kernel: fg.Kernel) -> int:
    """How many elements of rows of no sequence are not what they have to be."""
    q, k, v, do = arrays("float32", 16, 16)
    sequences = fg.Sequences(int32(*STARTS_Q), int32(*STARTS_K), 21, 33)
    o, lse = kernel(q, k, v, sequences=sequences)
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, sequences=sequences)
    queries, keys = ~inside(STARTS_Q, TOTAL_Q), ~inside(STARTS_K, TOTAL_K)
    zeros = (o[queries], dq[queries], dk[keys], dv[keys])
    return sum(int((x != 0).sum()) for x in zeros) + int((lse.T[queries] != -np.inf).sum())


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_a_bug_in_clear_gaps_shows(bug: str | None) -> None:
    built = fg.build(fg.AttentionSpec(16, dtype="fp32", varlen=True), arch="sm_80", target="emulator")
    kernels = dict(built._variant.kernels)
    clearing = kernels["clear_gaps"]
    if bug is not None:
        old, new = BUGS[bug]
        assert clearing.source.text.count(old) == 1
        text = clearing.source.text.replace(old, new)
        kernels["clear_gaps"] = clearing._replace(source=KernelSource(clearing.plan, text))
    found = wrong_rows(fg.Kernel(Variant(built.plan, kernels), "emulator"))
    assert (found > 0) == (bug is not None)
