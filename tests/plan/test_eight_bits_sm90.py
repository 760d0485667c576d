"""Tiles of the e4m3 forward kernel for Hopper, and how its steps overlap."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.arch import ARCHS
from flashgen.errors import PlanError
from flashgen.plan import plan
from flashgen.plan.hopper.forward_table import EIGHT_BITS
from flashgen.plan.model.plans import KernelPlan

NAME = "FlashAttention-3"
SPEC = fg.AttentionSpec(128, dtype="e4m3", direction="forward")
FIELDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": fg.causal()},
    "documents": {"mask": fg.document(np.zeros((1, 1), np.int32))},
    "softcap": {"score": fg.softcap(30.0)},
    "bias": {"score": fg.bias(np.zeros((2, 2), np.float16))},
    "packed": {"varlen": True},
}


def forward(dims: tuple[int, int], schedule: fg.Schedule | None = None, **fields: Any) -> KernelPlan:
    spec = replace(SPEC, head_dim=dims[0], head_dim_v=dims[1], **fields)
    return plan(spec, schedule, "sm_90a").kernel("forward")


@pytest.mark.parametrize(("name", "block"), list(product(FIELDS, (None, 64, 128))))
def test_tiles_are_whole_steps_of_keys_that_share_a_scale(name: str, block: int | None) -> None:
    for dim in range(16, 257, 16):
        kernel = forward((dim, dim), scale_block=block, **FIELDS[name])
        assert kernel.algorithm == NAME
        keys = int(kernel.constant("tile_kv"))
        assert keys % 32 == 0
        assert (block or keys) % keys == 0
        assert kernel.smem.bytes <= ARCHS["sm_90a"].max_smem_per_block


def test_steps_overlap_where_registers_allow() -> None:
    overlapping = {
        (dims, name)
        for dims, name in product(EIGHT_BITS, FIELDS)
        if "overlaps_steps" in forward(dims, **FIELDS[name]).switches
    }
    everywhere = set(product([(64, 64)], FIELDS)) - {((64, 64), "full")}
    plain = set(product([(96, 96), (128, 128), (192, 128)], ("full", "causal", "packed")))
    assert overlapping == everywhere | plain


def test_two_consumers_overlap_their_steps_also_without_a_mask() -> None:
    assert "overlaps_steps" in forward((64, 64), fg.Schedule(tile_q=128)).switches
    assert "overlaps_steps" not in forward((64, 64), fg.Schedule(tile_kv=96)).switches


def test_a_mask_takes_registers_of_the_widest_tiles() -> None:
    tiles = [int(forward((128, 128), **FIELDS[name]).constant("tile_kv")) for name in ("full", "causal", "packed")]
    assert tiles == [128, 96, 96]


@pytest.mark.parametrize(("tile_kv", "block", "words"), [(80, None, "multiple of 32"), (96, 64, "scale_block=64")])
def test_other_tiles_are_refused_with_a_remedy(tile_kv: int, block: int | None, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        forward((64, 64), fg.Schedule(tile_kv=tile_kv, algorithm="fa3"), scale_block=block)


def test_other_dtypes_have_no_transposers() -> None:
    names = set(forward((128, 128)).smem.names) - set(forward((128, 128), dtype="bf16", out_dtype=None).smem.names)
    assert names == {"transposed_v", "transposed_v_barriers", "ends_of_v"}
