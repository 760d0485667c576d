"""Sequences of different lengths, one behind the other: each as if it were alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.verify.cases.packed import Packing

ROWS = ((33, 50), (20, 7), (0, 5), (12, 0))
PACKING = Packing(ROWS, ((30, 50), (20, 6), (0, 5), (12, 0)), True)


def spec(**fields: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(16, dtype="fp32", varlen=True, **fields)


def batch() -> list[Any]:
    random = np.random.default_rng(0)
    return [random.standard_normal((4, n, 2, 16)).astype(np.float32) for n in (33, 50, 50, 33)]


def test_a_sequence_gives_what_it_gives_alone() -> None:
    packed = fg.build(spec(mask=fg.causal()), arch="sm_80", target="emulator")
    alone = fg.build(fg.AttentionSpec(16, dtype="fp32", mask=fg.causal()), arch="sm_80", target="emulator")
    everything = Packing(ROWS, ROWS, False)
    q, k, v, do = batch()
    arrays = [everything.pack(x, side) for x, side in ((q, 0), (k, 1), (v, 1), (do, 0))]
    sequences = everything.sequences(33, 50)
    o, lse = packed(*arrays[:3], sequences=sequences)
    gradients = packed.backward(arrays[3], *arrays[:3], o, lse, sequences=sequences)
    starts = np.cumsum([(0, 0), *ROWS], axis=0)
    for b, (len_q, len_kv) in enumerate(ROWS):
        mine = (q[b : b + 1, :len_q], k[b : b + 1, :len_kv], v[b : b + 1, :len_kv])
        own_o, own_lse = alone(*mine)
        own_gradients = alone.backward(do[b : b + 1, :len_q], *mine, own_o, own_lse)
        of_q, of_k = (slice(starts[b, side], starts[b + 1, side]) for side in (0, 1))
        assert np.array_equal(o[of_q], own_o[0])
        assert np.array_equal(lse[:, of_q], own_lse[0])
        for found, own, rows in zip(gradients, own_gradients, (of_q, of_k, of_k), strict=True):
            np.testing.assert_allclose(found[rows], own[0], atol=1e-6)


def test_captured_gradients_sum_over_what_is_used_and_dropout_goes_by_sequence() -> None:
    random = np.random.default_rng(1)
    bias = random.standard_normal((1, 2, 33, 50)).astype(np.float32)
    slopes, sink = random.standard_normal(2).astype(np.float32), random.standard_normal(2).astype(np.float32)
    asked = spec(mask=fg.causal(), score=fg.bias(bias) >> fg.alibi(slopes) >> fg.sink(sink), dropout=True)
    dropout, sequences = fg.Dropout(0.2, 5), PACKING.sequences(33, 50)
    q, k, v, do = batch()
    pq, pk, pv, pdo = (PACKING.pack(x, side) for x, side in ((q, 0), (k, 1), (v, 1), (do, 0)))
    kernel = fg.build(asked, arch="sm_80", target="emulator")
    o, lse = kernel(pq, pk, pv, sequences=sequences, dropout=dropout)
    call = {"captured_gradients": True, "sequences": sequences, "dropout": dropout}
    *_, found = kernel.backward(pdo, pq, pk, pv, o, lse, **call)
    more = {"dropout": dropout, "lengths": PACKING.used}
    exact = oracle.captured_gradients(asked, q, k, v, do, **more)
    limits = oracle.captured_bounds(asked, q, k, v, do, exact=exact, **more)
    assert len(exact) == 3
    for name, value in exact.items():
        assert np.abs(found[name] - value).max() <= limits[name], name


def test_gradients_are_the_same_bits_in_any_order() -> None:
    kernel = fg.build(spec(deterministic=True), arch="sm_80", target="emulator")
    sequences = PACKING.sequences(33, 50)
    q, k, v, do = (PACKING.pack(x, side) for x, side in zip(batch(), (0, 1, 1, 0), strict=True))
    o, lse = kernel(q, k, v, sequences=sequences)
    seen = set()
    for options in ({}, {"schedule": "reverse"}, {"schedule": "random", "seed": 3}):
        kernel.target.options = options  # type: ignore[attr-defined]
        seen.add(b"".join(x.tobytes() for x in kernel.backward(do, q, k, v, o, lse, sequences=sequences)))
    kernel.target.options = {}  # type: ignore[attr-defined]
    assert len(seen) == 1


def change(**fields: Any) -> fg.Sequences:
    given = {name: getattr(PACKING.sequences(33, 50), name) for name in fg.Sequences.__slots__}
    return fg.Sequences(**(given | fields))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: None, r"pass sequences=flashgen\.Sequences"),
        (lambda: change(max_seqlen_q=32), "sequence 0 .* has 33 rows, more than max_seqlen_q=32"),
        (
            lambda: change(cu_seqlens_k=np.array([0, 50, 40, 62, 62], np.int32)),
            r"cu_seqlens_k\[2\]=40 is below .*cu_seqlens_k\[1\]=50",
        ),
        (lambda: change(cu_seqlens_q=np.zeros(5, np.int64)), "is int64 .* pass 5 contiguous int32"),
        (lambda: change(seqused_k=np.zeros(5, np.int32)), "pass 4 contiguous int32"),
        (lambda: change(max_seqlen_k=-1), "max_seqlen_k=-1 is out of range"),
        (lambda: change(cu_seqlens_k=None), "cu_seqlens_k=None"),
    ],
)
def test_what_says_no_lengths_is_refused(make: Any, complaint: str) -> None:
    kernel = fg.build(spec(), arch="sm_80", target="emulator")
    q, k, v, _ = (PACKING.pack(x, side) for x, side in zip(batch(), (0, 1, 1, 0), strict=True))
    with pytest.raises(fg.ArgumentError, match=complaint):
        kernel(q, k, v, sequences=make())


def test_ranks_and_kernels_go_together() -> None:
    q, k, v, _ = batch()
    kernel = fg.build(spec(), arch="sm_80", target="emulator")
    with pytest.raises(fg.ArgumentError, match=r"built with varlen=True and takes \(total_q, heads_q, head_dim\)"):
        kernel(q, k, v, sequences=PACKING.sequences(33, 50))
    plain = fg.build(fg.AttentionSpec(16, dtype="fp32"), arch="sm_80", target="emulator")
    with pytest.raises(fg.ArgumentError, match="build one with varlen=True"):
        plain(q, k, v, sequences=PACKING.sequences(33, 50))


def test_no_sequences_at_all_are_fine() -> None:
    kernel = fg.build(spec(), arch="sm_80", target="emulator")
    none, start = np.zeros((0, 2, 16), np.float32), np.zeros(1, np.int32)
    sequences = fg.Sequences(start, start, 0, 0)
    o, lse = kernel(none, none, none, sequences=sequences)
    assert (o.shape, lse.shape) == ((0, 2, 16), (2, 0))
    assert [x.shape for x in kernel.backward(none, none, none, none, o, lse, sequences=sequences)] == [(0, 2, 16)] * 3


def test_on_hopper_both_passes_are_flash_attention_3() -> None:
    from flashgen.plan import plan

    made = plan(fg.AttentionSpec(128, mask=fg.causal(), varlen=True), None, "sm_90a")
    roles = ("forward", "prepare", "main", "repair")
    assert {made.kernel(role).algorithm for role in roles} == {"FlashAttention-3"}
