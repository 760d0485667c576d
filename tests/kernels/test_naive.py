"""The naive kernel: any length, head dimension, dtype and band mask."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.plan import plan

NAIVE = fg.Schedule(algorithm="naive")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (fg.AttentionSpec(192), "its head dims end at 128; use algorithm='fa2', or leave algorithm out"),
        (fg.AttentionSpec(64, mask=fg.dilated(2)), "its masks are full, causal and windows"),
        (fg.AttentionSpec(64, score=fg.softcap(30.0)), "it has no scores"),
        (fg.AttentionSpec(64, varlen=True), "its sequences are equally long"),
        (fg.AttentionSpec(64, dropout=True), "it has no dropout"),
    ],
)
def test_specs_beyond_the_algorithm_are_refused_with_the_remedy(spec: fg.AttentionSpec, message: str) -> None:
    with pytest.raises(fg.PlanError, match=message):
        plan(spec, NAIVE)


def test_a_schedule_for_tiles_is_refused() -> None:
    with pytest.raises(fg.PlanError, match="algorithm='naive' has no tile_q to choose; leave tile_q out"):
        plan(fg.AttentionSpec(64), fg.Schedule(algorithm="naive", tile_q=64))


def test_gradients_come_from_flash_attention_2() -> None:
    kernels = plan(fg.AttentionSpec(64, mask=fg.causal()), NAIVE, "sm_90a").kernels
    assert [(kernel.role, kernel.algorithm) for kernel in kernels] == [
        ("forward", "naive attention"),
        *((role, "FlashAttention-2") for role in ("prepare", "main", "finish")),
    ]
