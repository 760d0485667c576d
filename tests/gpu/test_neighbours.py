"""What a row comes to does not depend on its neighbours, on a GPU as on the emulator: scores that a warp takes once
more for a row that has grown are the same in every bit, also where one instruction made them and then another."""

from __future__ import annotations

import pytest

import flashgen as fg

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

MASKS = {"full": fg.full(), "causal": fg.causal(), "window": fg.window(150, 30)}
LENGTH = 700


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_row_is_the_same_in_every_bit_whatever_its_neighbours_are(head_dim: int, dtype: str, mask: str) -> None:
    import torch

    kernel = fg.build(fg.AttentionSpec(head_dim, dtype=dtype, mask=MASKS[mask], direction="forward"))
    torch.manual_seed(head_dim)
    element = torch.bfloat16 if dtype == "bf16" else torch.float16
    q, k, v = (torch.randn(2, LENGTH, 4, head_dim, device="cuda").to(element) for _ in range(3))
    # Of every second warp's sixteen rows one is changed, and of each of these another one.
    changed = torch.arange(LENGTH, device="cuda") % 37 == 5
    for scale in (1, 3):
        out, lse = kernel(q * scale, k, v)
        for wild in (300.0, -300.0, 40.0, float("nan")):
            other = q * scale
            other[:, changed] *= wild
            found, found_lse = kernel(other, k, v)
            assert torch.equal(found[:, ~changed], out[:, ~changed])
            assert torch.equal(found_lse[:, :, ~changed], lse[:, :, ~changed])
            assert not torch.equal(found[:, changed], out[:, changed])
