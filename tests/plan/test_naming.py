"""Kernel names: one name, one source, so that an override file replaces one kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import PlanError
from flashgen.plan import plan
from flashgen.plan.fallbacks import fallbacks, for_alignment
from flashgen.plan.model.plans import AttentionPlan, KernelPlan

BACKWARD = fg.Schedule(backward=fg.BackwardSchedule(tile_q=32))
SCHEDULES = (
    None,
    fg.Schedule(tile_q=64),
    fg.Schedule(tile_kv=32),
    fg.Schedule(tile_q=64, tile_kv=32),
    fg.Schedule(tile_kv=32, stages=1),
    fg.Schedule(stages=1),
    fg.Schedule(warps=fg.WarpPartition("split_q", 8)),
    fg.Schedule(warps=fg.WarpPartition("split_k", 4)),
    fg.Schedule(warps=fg.WarpPartition("split_k", 2)),
    fg.Schedule(tile_kv=64, warps=fg.WarpPartition("split_k", 4)),
    fg.Schedule(warps=fg.WarpPartition("specialized", consumers=2)),
    fg.Schedule(warps=fg.WarpPartition("specialized", consumers=3)),
    fg.Schedule(registers=(40, 232)),
    fg.Schedule(softmax="running-max"),
    fg.Schedule(algorithm="fa2"),
    fg.Schedule(algorithm="fa2", tile_q=64),
    fg.Schedule(algorithm="fa3"),
    fg.Schedule(algorithm="naive"),
    fg.Schedule(algorithm="fa1"),
    fg.Schedule(algorithm="fa1", tile_kv=32),
    fg.Schedule(algorithm="grid2d", tile_kv=32),
    BACKWARD,
    fg.Schedule(backward=fg.BackwardSchedule(tile_q=32, stages=1)),
    fg.Schedule(backward=fg.BackwardSchedule(tile_kv=64)),
    fg.Schedule(backward=fg.BackwardSchedule(warps=8)),
    fg.Schedule(algorithm="fa1", backward=fg.BackwardSchedule(tile_q=32)),
)
SPECS = {
    "causal": fg.AttentionSpec(64, mask=fg.causal()),
    "softcap": fg.AttentionSpec(128, mask=fg.causal(), score=fg.softcap(30.0)),
    "varlen": fg.AttentionSpec(64, mask=fg.window(64, 0), varlen=True),
    "document": fg.AttentionSpec(256, mask=fg.document(np.zeros((2, 64), np.int32))),
    "paged": fg.AttentionSpec(64, mask=fg.causal(), cache="paged", direction="forward"),
}


def source_of(kernel: KernelPlan) -> KernelPlan:
    """The kernel without what its source does not depend on."""
    return replace(kernel, schedule=None, reasons=(), access_bytes=0, algorithm="", choice=None)


def variants(attention: AttentionPlan) -> tuple[AttentionPlan, ...]:
    return attention, *fallbacks(attention), for_alignment(attention, attention.access_bytes // 2)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("name", SPECS)
def test_kernels_with_different_sources_have_different_names(name: str, arch: str) -> None:
    dtype = "fp16" if arch == "sm_75" else "bf16"
    sources: dict[str, KernelPlan] = {}
    planned = 0
    for schedule in SCHEDULES:
        try:
            attention = plan(replace(SPECS[name], dtype=dtype), schedule, arch)
        except PlanError:
            continue
        planned += 1
        for made in variants(attention):
            for kernel in made.kernels:
                source = source_of(kernel)
                assert sources.setdefault(kernel.name, source) == source, (kernel.name, schedule)
    assert planned > 8


def test_a_changed_kernels_name_lists_how_it_differs_from_the_default_one() -> None:
    schedule = fg.Schedule(tile_q=64, stages=1, backward=fg.BackwardSchedule(tile_q=32, warps=2))
    made = plan(SPECS["causal"], schedule, "sm_80")
    assert made.kernel("forward").name == "forward_d64_causal_q64_stages1_sm80"
    assert made.kernel("main").name == "backward_main_d64_causal_q32_warps2_sm80"


def test_without_a_schedule_names_have_no_suffix() -> None:
    made = plan(SPECS["causal"], None, "sm_90a")
    assert made.kernel("forward").name == "forward_d64_causal_sm90a"
    assert made.kernel("main").name == "backward_main_d64_causal_sm90a"


def test_a_schedule_that_asks_for_the_default_keeps_the_names() -> None:
    made = plan(SPECS["causal"], None, "sm_80")
    again = plan(SPECS["causal"], made.schedule, "sm_80")
    assert [kernel.name for kernel in again.kernels] == [kernel.name for kernel in made.kernels]
