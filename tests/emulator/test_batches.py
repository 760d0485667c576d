"""Products that are issued one by one and carried out together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError

# All elements of A are 1, those of B 2: each product adds 32 to every sum.
OPERANDS = """const int lane = thread_idx() % 32;
const u32 a[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00}, b[2] = {0x40004000, 0x40004000};
float c[40][4], d[4] = {};
for (int i = 0; i < 40; ++i) for (int e = 0; e < 4; ++e) c[i][e] = i;
"""


@pytest.mark.parametrize("schedule", ["sequential", "reverse", "random"])
def test_more_products_than_a_batch_holds_all_arrive(run: Any, schedule: str) -> None:
    out = np.zeros((64, 40), np.float32)
    body = """for (int k = 0; k < 5; ++k)
      for (int i = 0; i < 40; ++i) mma_m16n8k16_batched(half_t{}, c[i], a, b);
    mma_finish();
    for (int i = 0; i < 40; ++i) out[40 * thread_idx() + i] = c[i][lane % 4];"""
    run(OPERANDS + body, threads=64, schedule=schedule, out=out)
    np.testing.assert_array_equal(out, np.broadcast_to(np.arange(40) + 5 * 32, (64, 40)))


def test_operands_may_change_once_a_product_is_issued(run: Any) -> None:
    out = np.zeros(32, np.float32)
    body = """u32 left[4] = {a[0], a[1], a[2], a[3]};
    mma_m16n8k16_batched(half_t{}, d, left, b);
    for (u32& word : left) word = 0;
    mma_m16n8k16_batched(half_t{}, d, left, b);
    mma_finish();
    out[lane] = d[1];"""
    run(OPERANDS + body, out=out)
    np.testing.assert_array_equal(out, 32)


@pytest.mark.parametrize("then", ["", "warp_sync();", "block_sync();", "warp_any(true);"])
def test_products_that_nobody_finishes_are_a_finding(run: Any, then: str) -> None:
    with pytest.raises(EmulationError, match="unfinished products: 1 matrix products"):
        run(OPERANDS + "mma_m16n8k16_batched(half_t{}, d, a, b);\n" + then)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (lane != 9) mma_m16n8k16_batched(half_t{}, d, a, b);\nmma_finish();",
            "this lane has issued 0 products while other lanes of its warp issued 1",
        ),
        (
            "if (lane < 9) mma_m16n8k16_batched(half_t{}, d, a, b);\n"
            "else mma_m16n8k16_batched(bfloat16_t{}, d, a, b);\nmma_finish();",
            "this lane is at mma while other lanes of its warp were at mma",
        ),
        (
            "for (int i = 0; i < 2; ++i) mma_m16n8k16_batched(half_t{}, i && lane > 9 ? c[0] : d, a, b);\n"
            "mma_finish();",
            "this lane adds to other accumulators than before",
        ),
    ],
)
def test_lanes_that_issue_different_products_are_a_finding(run: Any, body: str, message: str) -> None:
    with pytest.raises(EmulationError) as caught:
        run(OPERANDS + body)
    assert str(caught.value).startswith("divergent collective: ")
    assert message in str(caught.value)
