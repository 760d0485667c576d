"""Specs that the forward kernel for Hopper does not take use the kernels for all GPUs; asked for, it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.arch import get_arch
from flashgen.plan import default_access_bytes, plan
from flashgen.plan.fallbacks import fallbacks, for_alignment
from flashgen.plan.hopper.forward import why_not
from flashgen.render import render
from tests.plan.test_forward_sm90 import ARCH, SPECIALIZED, forward

FALLBACKS: dict[str, tuple[dict[str, Any], fg.Schedule | None, str, str]] = {
    "asked for": ({}, fg.Schedule(algorithm="fa2"), "sm_90a", "its schedule says algorithm='fa2'"),
    "generation": ({}, None, "sm_90", "it needs sm_90a, and this is sm_90"),
    "later generation": ({}, None, "sm_100a", "it needs sm_90a, and this is sm_100a"),
    "fp32": ({"dtype": "fp32"}, None, "sm_90a", "take fp16, bf16 and e4m3, and dtype is 'fp32'"),
    "rows of 120 bytes": ({"head_dim": 60}, None, "sm_90a", "head dims must be multiples of 8"),
    "rows of 8 bytes": ({"head_dim_v": 4}, None, "sm_90a", "TMA needs rows of a multiple of 16 bytes"),
    "a cache": ({"cache": "paged"}, None, "sm_90a", "it takes no cache of keys and values"),
    "tiles": ({}, fg.Schedule(tile_q=64), "sm_90a", "it cannot be planned: tile_q=64 is not 64 rows for each"),
    "wide tiles": ({"head_dim": 64}, fg.Schedule(tile_kv=144), "sm_90a", "planned: tile_kv=144 is more keys than"),
    "one stage": ({}, fg.Schedule(stages=1), "sm_90a", "leaves no tile to copy into while another is used"),
    "partition": ({}, fg.Schedule(warps=fg.WarpPartition("split_k", 4)), "sm_90a", "warps='split_k' is a partition of"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_specs_that_it_does_not_take_use_the_kernels_for_all_gpus_and_there_is_a_reason(name: str) -> None:
    fields, schedule, arch, words = FALLBACKS[name]
    spec = fg.AttentionSpec(**{"head_dim": 128, "direction": "forward"} | fields)
    kernel = plan(spec, schedule, arch).kernel("forward")
    assert (kernel.template, kernel.algorithm, kernel.boxes) == ("forward.cu.j2", "FlashAttention-2", ())
    reason = why_not(spec, schedule or fg.Schedule(), get_arch(arch), default_access_bytes(spec))
    assert reason is not None
    assert words in reason


def test_specs_that_it_takes_have_no_reason_against_it() -> None:
    assert why_not(fg.AttentionSpec(128), fg.Schedule(), ARCH, 16) is None
    assert why_not(fg.AttentionSpec(128), fg.Schedule(warps=SPECIALIZED), ARCH, 16) is None


@pytest.mark.parametrize("access", [2, 4, 8])
def test_less_aligned_tensors_use_the_kernels_for_all_gpus(access: int) -> None:
    kernel = forward(access=access)
    assert (kernel.algorithm, kernel.access_bytes) == ("FlashAttention-2", access)
    reason = why_not(kernel.spec, fg.Schedule(), ARCH, access)
    assert reason == "TMA needs tensors aligned to 16 bytes"


@pytest.mark.parametrize("schedule", [fg.Schedule(algorithm="fa3"), fg.Schedule(warps=SPECIALIZED)])
@pytest.mark.parametrize(
    ("spec", "arch", "reason"),
    [
        ({"head_dim": 128}, "sm_80", "it needs sm_90a, and this is sm_80"),
        ({"head_dim": 64, "dtype": "fp32"}, "sm_90a", "dtype is 'fp32'"),
        ({"head_dim": 84}, "sm_90a", "head dims must be multiples of 8"),
    ],
)
def test_asked_for_where_it_cannot_be_it_is_refused(
    spec: dict[str, Any], arch: str, reason: str, schedule: fg.Schedule
) -> None:
    with pytest.raises(fg.PlanError) as error:
        plan(fg.AttentionSpec(**spec), schedule, arch)
    assert str(error.value).startswith(f"algorithm='fa3' cannot be planned for head_dim {spec['head_dim']}")
    assert reason in str(error.value)
    assert str(error.value).endswith("leave algorithm out.")


def test_fewer_queries_than_a_warpgroup_has_run_by_the_kernel_for_all_gpus() -> None:
    for dim in (64, 128, 256):
        schedule = fg.Schedule(tile_q=32)
        assert plan(fg.AttentionSpec(dim), schedule, "sm_90a").kernel("forward").template == "forward.cu.j2"
        with pytest.raises(fg.PlanError, match="tile_q=32"):
            plan(fg.AttentionSpec(dim), replace(schedule, algorithm="fa3"), "sm_90a")


def schedules_instead(attention: fg.plan.AttentionPlan) -> list[fg.Schedule | None]:
    """The schedules of the fallbacks, in order."""
    return [fallback.kernel("forward").schedule for fallback in fallbacks(attention)]


@pytest.mark.parametrize(("dim", "least"), [(64, 64), (128, 64), (256, 48)])
def test_without_registers_fewer_keys_are_tried_before_the_kernel_for_all_gpus(dim: int, least: int) -> None:
    backward = fg.BackwardSchedule(tile_q=64)
    spec = fg.AttentionSpec(dim, mask=fg.chunked(9))
    fewer, other = (
        fallback.kernel("forward") for fallback in fallbacks(plan(spec, fg.Schedule(backward=backward), "sm_90a"))
    )
    assert (fewer.schedule, other.schedule) == (
        fg.Schedule(tile_kv=least, backward=backward),
        fg.Schedule(warps=fg.WarpPartition("split_q", int(other.constant("warps"))), backward=backward),
    )
    assert [fewer.algorithm, other.algorithm] == ["FlashAttention-3", "FlashAttention-2"]
    assert fewer.constant("tile_kv") == least


def test_a_fallback_is_planned_only_once_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []

    def counted(*arguments: Any, **options: Any) -> fg.plan.AttentionPlan:
        planned.append(arguments)
        return plan(*arguments, **options)

    monkeypatch.setattr("flashgen.plan.fallbacks.plan", counted)
    left = fallbacks(plan(fg.AttentionSpec(64), None, "sm_90a"))
    assert planned == []
    next(left)
    assert len(planned) == 1


def test_where_tiles_are_as_small_as_they_get_only_the_kernel_for_all_gpus_is_left() -> None:
    bias = fg.bias(np.zeros((2, 2), np.float16))
    narrow = plan(fg.AttentionSpec(256, mask=fg.chunked(9), score=bias), None, "sm_90a")
    assert schedules_instead(narrow) == [fg.Schedule(warps=fg.WarpPartition("split_q", 8))]


@pytest.mark.parametrize("mask", [fg.causal(), fg.document(np.zeros((2, 64), np.int32))], ids=["band", "captured"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_last_fallback_changes_the_forward_algorithm_alone(dim: int, mask: fg.Mask) -> None:
    spec = fg.AttentionSpec(dim, mask=mask)
    attention, asked = (plan(spec, schedule, "sm_90a") for schedule in (None, fg.Schedule(algorithm="fa2")))
    *_, last = fallbacks(attention)
    assert last.kernel("forward").config == asked.kernel("forward").config
    for role, algorithm in (
        ("forward", "FlashAttention-2"),
        ("prepare", "FlashAttention-3"),
        ("main", "FlashAttention-3"),
    ):
        assert last.kernel(role).algorithm == algorithm


@pytest.mark.parametrize("mask", [fg.causal(), fg.document(np.zeros((2, 64), np.int32))], ids=["band", "captured"])
@pytest.mark.parametrize("dim", [64, 256])
def test_kernels_of_one_name_have_one_source(dim: int, mask: fg.Mask) -> None:
    attention = plan(fg.AttentionSpec(dim, mask=mask), None, "sm_90a")
    codes: dict[str, str] = {}
    for made in (attention, *fallbacks(attention), for_alignment(attention, 8), for_alignment(attention, 2)):
        for kernel in made.kernels:
            code = render(kernel).code
            assert codes.setdefault(kernel.name, code) == code, kernel.name


@pytest.mark.parametrize(
    ("schedule", "arch"),
    [(fg.Schedule(algorithm="fa3"), "sm_90a"), (fg.Schedule(tile_kv=96), "sm_90a"), (None, "sm_80")],
)
def test_what_was_asked_for_is_not_replaced(schedule: fg.Schedule | None, arch: str) -> None:
    assert schedules_instead(plan(fg.AttentionSpec(128), schedule, arch)) == []


def test_less_aligned_arguments_keep_what_the_schedule_says_of_kernels_that_stay() -> None:
    schedule = fg.Schedule(algorithm="fa3", tile_kv=96, backward=fg.BackwardSchedule(tile_q=64))
    less = for_alignment(plan(fg.AttentionSpec(128), schedule, "sm_90a"), 8)
    assert less.kernel("forward").schedule == fg.Schedule(backward=schedule.backward)
    assert {kernel.access_bytes for kernel in less.kernels} == {8}
    assert less.kernel("main").constant("tile_q") == 64


@pytest.mark.parametrize(("access", "stages"), [(8, 2), (4, 2), (2, 1)])
def test_stages_that_an_alignment_cannot_fill_are_dropped(access: int, stages: int) -> None:
    schedule = fg.Schedule(tile_q=64, stages=2, backward=fg.BackwardSchedule(stages=2))
    attention = plan(fg.AttentionSpec(64), schedule, "sm_80")
    less = for_alignment(attention, access)
    assert less.kernel("forward").constant("tile_q") == 64
    assert [less.kernel(role).constant("stages") for role in ("forward", "main")] == [stages, stages]


def test_without_registers_for_them_the_kernels_for_caches_are_left_out() -> None:
    spec = fg.AttentionSpec(128, cache="paged", direction="forward")
    left = [
        {kernel.role for kernel in each.kernels}
        for each in (plan(spec, None, "sm_90a"), *fallbacks(plan(spec, None, "sm_90a")))
    ]
    assert {"forward", "prefill", "decode"} <= left[0]
    assert [left[0] - roles for roles in left[1:]] == [{"prefill"}, {"prefill", "decode"}]
    # The portable decode kernel has registers for any mask and score.
    assert not list(fallbacks(plan(spec, None, "sm_80")))


def test_without_registers_for_it_the_only_kernel_for_a_cache_is_the_portable_one() -> None:
    spec = fg.AttentionSpec(64, head_dim_v=512, qv=True, cache="paged", direction="forward")
    attention = plan(spec, None, "sm_90a")
    (left,) = fallbacks(attention)
    assert attention.forward.boxes
    assert not left.forward.boxes
    assert [kernel.role for kernel in left.kernels] == [kernel.role for kernel in attention.kernels]
    assert not list(fallbacks(left))
