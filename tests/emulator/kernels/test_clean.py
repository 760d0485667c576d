"""The project's kernels as they are: right results and no findings, in every mode."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule, WarpPartition, causal, full, window
from flashgen.verify.cases.packed import Packing
from tests.drawn import IS_SAMPLE

pytestmark = pytest.mark.in_turns(12)

Spec = AttentionSpec

PACKING = Packing(((30, 70), (150, 33), (17, 0)), ((20, 65), (150, 33), (0, 0)), True)


def split_k(warps: int, **tiles: int) -> Schedule:
    return Schedule(warps=WarpPartition("split_k", warps), **tiles)


#: (spec, (len_q, len_kv), further fields of a Case): each dtype, mask, partition, family of architectures.
CASES: list[tuple[Spec, tuple[int, int], dict[str, Any]]] = [
    (Spec(128, mask=causal()), (130, 197), {"arch": "sm_90"}),
    (Spec(64, mask=causal()), (130, 100), {"arch": "sm_90", "batch": 2, "heads": 4}),
    (Spec(128, dtype="fp16", mask=causal()), (70, 90), {"arch": "sm_75"}),
    (Spec(64, dtype="fp32", mask=causal()), (70, 90), {"arch": "sm_75"}),
    (Spec(64, dtype="fp32", mask=causal(), deterministic=True), (70, 90), {}),
    (Spec(64, mask=window(20, 10), deterministic=True), (150, 170), {}),
    (Spec(40, head_dim_v=72, dtype="fp16", mask=window(20, 10)), (150, 120), {}),
    (Spec(20, head_dim_v=7, dtype="fp16", mask=causal("top-left")), (100, 120), {"heads": 4}),
    (Spec(21, dtype="fp32"), (1, 130), {"heads": 4, "heads_kv": 1}),
    (Spec(96), (129, 65), {"heads": 4, "heads_kv": 1}),
    (Spec(256, mask=causal()), (70, 65), {"arch": "sm_86"}),
    (Spec(192, head_dim_v=128, mask=causal()), (70, 65), {"arch": "sm_90"}),
    (Spec(64, mask=causal()), (5, 200), {"schedule": split_k(4)}),
    (Spec(128), (50, 200), {"schedule": split_k(2)}),
    (Spec(64, dtype="fp32"), (17, 99), {"schedule": split_k(2, tile_kv=32)}),
    (
        Spec(64, mask=causal()),
        (130, 200),
        {
            "schedule": Schedule(
                stages=3, tile_kv=32, backward=BackwardSchedule(tile_q=32, tile_kv=64, warps=4, stages=2)
            )
        },
    ),
    (Spec(96, head_dim_v=40, mask=window(20, 10), dropout=True), (70, 90), {"heads": 4}),
    (Spec(40, dtype="fp32", dropout=True, deterministic=True), (33, 70), {"arch": "sm_75"}),
    (Spec(64, dtype="fp16", mask=causal(), dropout=True), (20, 150), {"schedule": split_k(2), "arch": "sm_75"}),
    (Spec(64, mask=window(20, 10), varlen=True, deterministic=True), (150, 70), {"batch": 3, "packing": PACKING}),
    (Spec(40, dtype="fp16", varlen=True, dropout=True), (150, 70), {"batch": 3, "packing": PACKING, "arch": "sm_75"}),
    (Spec(24, dtype="fp32", mask=window(20, 10), direction="forward", cache="paged"), (20, 56), {"arch": "sm_75"}),
    # Tiles of keys of which the last two are cut, for each of the ways to share dQ; and with sums for two heads.
    (Spec(96, dtype="fp16"), (300, 300), {"arch": "sm_90a", "heads": 4, "heads_kv": 2, "sum_blocks": 0}),
    (Spec(64), (520, 300), {"arch": "sm_90a", "heads": 4, "heads_kv": 2, "sum_blocks": 0}),
    (Spec(128), (620, 300), {"arch": "sm_90a", "heads": 3, "heads_kv": 3, "sum_blocks": 0}),
    # No keys, or none that a tile of queries may attend to: loops that never run.
    (Spec(64), (10, 0), {}),
    (Spec(64, mask=causal()), (200, 10), {}),
    (Spec(64, dtype="fp16", mask=full()), (0, 10), {"arch": "sm_75"}),
]
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "random": {"schedule": "random", "seed": 1, "at": "begin"},
    "race": {"race": True},
    "random race": {"race": True, "schedule": "random", "seed": 2},
}


def done() -> list[tuple[int, str]]:
    """Cases and modes: all with DRAWN_CASES=ci. A developer's run takes every fourth case, and watches the
    accesses of every other of these."""
    if not IS_SAMPLE:
        return list(product(range(len(CASES)), MODES))
    return [(i, mode) for i in range(1, len(CASES), 4) for mode in list(MODES)[0 if i % 8 == 1 else 2 :][:2]]


@pytest.mark.parametrize(("index", "mode"), done(), ids=lambda x: x if isinstance(x, str) else CASES[x][0].describe())
def test_a_kernel_without_bugs_is_right_and_clean(check: Any, case: Any, index: int, mode: str) -> None:
    spec, lengths, fields = CASES[index]
    assert check(case(spec, *lengths, **{"heads": 2, **fields}), **MODES[mode]) == []
