"""What a user says of the schedule holds; what cannot be is refused by a sentence that names the way out."""

from __future__ import annotations

from itertools import product

import pytest

import flashgen as fg
from flashgen.plan import plan

SPEC = fg.AttentionSpec(64, dtype="fp16", mask=fg.causal())


def test_a_complete_schedule_is_what_the_kernels_get() -> None:
    asked = fg.Schedule(
        tile_q=32,
        tile_kv=48,
        stages=3,
        warps=fg.WarpPartition("split_q", 2),
        backward=fg.BackwardSchedule(tile_q=32, tile_kv=64, stages=2, warps=4),
    )
    made = plan(SPEC, asked, "sm_80")
    assert made.schedule == asked
    forward, main = made.kernel("forward"), made.kernel("main")
    names = ("tile_q", "tile_kv", "stages", "warps")
    assert [forward.constant(n) for n in names] == [32, 48, 3, 2]
    assert [main.constant(n) for n in names] == [32, 64, 2, 4]
    assert (forward.threads, main.threads) == (64, 128)
    assert (forward.grid_tile, main.grid_tile) == (32, 64)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_the_chosen_schedule_asked_for_again_is_the_same_plan(arch: str) -> None:
    for dim, dtype in product((33, 64, 128, 256), ("fp16", "fp32")):
        spec = fg.AttentionSpec(dim, dtype=dtype, direction="both" if dim < 256 else "forward")
        chosen = plan(spec, None, arch)
        again = plan(spec, chosen.schedule, arch)
        assert again.schedule == chosen.schedule
        for one, other in zip(chosen.kernels, again.kernels, strict=True):
            assert (one.threads, one.smem, one.grid_tile) == (other.threads, other.smem, other.grid_tile)


@pytest.mark.parametrize("field", ["tile_q", "tile_kv"])
def test_any_tile_of_one_warp_fits_small_heads(field: str) -> None:
    spec = fg.AttentionSpec(16, dtype="fp16", direction="forward")
    for size in (16, 48, 80, 112):
        made = plan(spec, fg.Schedule(**{field: size}, warps=fg.WarpPartition("split_q", 1)), "sm_80")
        assert getattr(made.schedule, field) == size


@pytest.mark.parametrize(
    ("spec", "schedule", "arch", "words"),
    [
        (
            fg.AttentionSpec(128, dtype="fp16"),
            fg.Schedule(tile_q=64, tile_kv=256, stages=2, warps=fg.WarpPartition("split_q", 4)),
            "sm_75",
            ["stages=2", "sm_75", "use stages=1", "What would fit: tile_q="],
        ),
        (
            fg.AttentionSpec(128, dtype="bf16"),
            fg.Schedule(tile_q=128, tile_kv=128, stages=4, warps=fg.WarpPartition("split_q", 8)),
            "sm_86",
            [
                "shared memory per block",
                "sm_86 has 101376",
                "use smaller tiles or fewer stages",
                "What would fit: ",
            ],
        ),
        (
            fg.AttentionSpec(256, dtype="bf16"),
            fg.Schedule(tile_q=256, warps=fg.WarpPartition("split_q", 4)),
            "sm_90",
            ["registers per thread", "use a smaller tile_q or tile_kv, or more warps", "What would fit: "],
        ),
        (
            fg.AttentionSpec(64),
            fg.Schedule(tile_q=16, warps=fg.WarpPartition("split_q", 4)),
            "sm_80",
            ["tile_q=16", "4 query rows", "use tile_q=64 or a multiple of it"],
        ),
        (
            fg.AttentionSpec(64),
            fg.Schedule(tile_kv=32, warps=fg.WarpPartition("split_k", 4)),
            "sm_80",
            ["tile_kv=32", "8 keys", "use tile_kv=64 or a multiple of it"],
        ),
        (
            fg.AttentionSpec(64),
            fg.Schedule(backward=fg.BackwardSchedule(stages=3)),
            "sm_80",
            ["The backward kernel", "stages=3", "use 1 or 2", "What would fit: "],
        ),
        (
            fg.AttentionSpec(64),
            fg.Schedule(backward=fg.BackwardSchedule(tile_q=16, tile_kv=16, warps=16)),
            "sm_80",
            ["cannot be divided among 16 warps", "use fewer warps or larger tiles"],
        ),
        (
            fg.AttentionSpec(64),
            fg.Schedule(backward=fg.BackwardSchedule(tile_q=256, tile_kv=256, warps=4)),
            "sm_90",
            ["registers per thread for accumulators", "use smaller tiles or more warps"],
        ),
        (
            fg.AttentionSpec(64, dtype="bf16"),
            None,
            "sm_75",
            ["dtype='bf16'", "sm_75", "use dtype='fp16' or 'fp32'"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(
    spec: fg.AttentionSpec, schedule: fg.Schedule | None, arch: str, words: list[str]
) -> None:
    with pytest.raises(fg.PlanError) as error:
        plan(spec, schedule, arch)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("access", [1, 3, 32, -16])
def test_an_alignment_that_no_access_has_is_refused(access: int) -> None:
    with pytest.raises(fg.PlanError, match=rf"access_bytes={access} .*use a power of two from 2 to 16"):
        plan(SPEC, None, "sm_80", access_bytes=access)


def test_rows_that_no_wide_access_divides_are_refused_one() -> None:
    with pytest.raises(fg.PlanError, match=r"access_bytes=16 .*from 2 to 8"):
        plan(fg.AttentionSpec(20, dtype="fp16"), None, "sm_80", access_bytes=16)


def test_an_unknown_arch_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(fg.PlanError, match=r"arch='sm_70' is not known; use one of sm_75, sm_80"):
        plan(SPEC, None, "sm_70")


def test_narrow_alignment_gives_way_to_one_stage() -> None:
    made = plan(SPEC, None, "sm_80", access_bytes=2)
    assert {k.constant("async_copy") for k in made.kernels if k.role != "prepare"} == {False}
    assert made.schedule.stages == made.schedule.backward.stages == 1


def test_the_defaults_have_reasons() -> None:
    for arch, dim in product(("sm_75", "sm_80", "sm_86", "sm_90"), (64, 128, 256)):
        for kernel in plan(fg.AttentionSpec(dim, dtype="fp16"), None, arch).kernels:
            assert bool(kernel.reasons) == (kernel.role in ("forward", "main", "query")), kernel.role
