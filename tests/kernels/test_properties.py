"""Any spec, schedule, shape, layout and value: what the kernels give is as near to the oracle as it must be, and
the emulator finds nothing.

How much is done: DRAWN_CASES=sample (what a developer's run does), ci (over 1,000 cases) or nightly (over
100,000). Cases are the same in every run, unless DRAWN_FIRST=1000 or the like asks for later builds. A compiler run
costs as much as many launches, so each build is tried on many cases. A failure ends with the command that repeats it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

import flashgen as fg
from flashgen.arch import ARCHS, Arch
from flashgen.cli.commands.checking import Subject, Wish, systematic_failure
from flashgen.cli.output.check_report import describe_failure
from flashgen.emulator import load
from flashgen.plan import plan
from flashgen.plan.hopper.forward_table import TABLE
from flashgen.plan.model.plans import AttentionPlan
from flashgen.render import render
from flashgen.verify import Mode, Tally, Tiles, Trial, draw, modes
from tests.drawn import LEVEL, some

#: Head dims that the schedule table has rows for.
HEAD_DIMS = list(TABLE)
#: Builds of each group, and cases of each build.
LEVELS = {"sample": (1, 10), "ci": (4, 24), "nightly": (84, 100)}
GROUPS = (
    ("sm_75", "fp16"),
    ("sm_75", "fp32"),
    ("sm_80", "fp16"),
    ("sm_80", "bf16"),
    ("sm_80", "fp32"),
    ("sm_86", "bf16"),
    ("sm_89", "fp16"),
    ("sm_90", "bf16"),
    ("sm_100", "fp16"),
    ("sm_120", "bf16"),
    ("sm_90a", "bf16"),
    ("sm_90a", "fp16"),
    ("sm_89", "e4m3"),
    ("sm_90a", "e4m3"),
    ("sm_120", "e4m3"),
)
#: Algorithms that others are compared with, which have kernels of their own.
LINEAGE_GROUPS = (
    ("sm_75", "fp16", "standard"),
    ("sm_80", "bf16", "standard"),
    ("sm_80", "fp32", "standard"),
    ("sm_120", "fp16", "standard"),
)
DIMS = (16, 32, 64, 64, 72, 96, 128)
EIGHT_BIT_DIMS = (16, 32, 48, 64, 64, 80, 128, 256)


@dataclass(frozen=True)
class Build:
    """What is compiled."""

    spec: fg.AttentionSpec
    schedule: fg.Schedule | None
    arch: str

    @property
    def plan(self) -> AttentionPlan:
        return plan(self.spec, self.schedule, self.arch)


def drawn_build(arch: str, dtype: str, number: int) -> Build:
    """A spec with a schedule that can be planned: where one cannot, the plan chooses more of it."""
    random = Random(f"{arch} {dtype} {number}")
    if ARCHS[arch].has_wgmma and dtype != "e4m3":
        return drawn_build_for_hopper(random, arch, dtype, number)
    while True:
        spec = drawn_spec(random, dtype)
        schedule = drawn_schedule(random)
        one_stage = replace(schedule, stages=None, backward=replace(schedule.backward, stages=None))
        default = fg.BackwardSchedule()
        wishes = [schedule, one_stage, replace(schedule, backward=default), replace(one_stage, backward=default)]
        wishes = random.choice((wishes, wishes, wishes, []))
        for wish in (*wishes, None):
            if can_be_planned(spec, wish, arch):
                return Build(spec, wish, arch)


def drawn_build_of(algorithm: str, arch: str, dtype: str, number: int) -> Build:
    """The same for an algorithm that others are compared with: it covers some specs, and has no schedule to choose."""
    random = Random(f"{algorithm} {arch} {dtype} {number}")
    schedule = fg.Schedule(algorithm=algorithm)  # type: ignore[arg-type]
    while True:
        spec = drawn_spec(random, dtype)
        if can_be_planned(spec, schedule, arch):
            return Build(spec, schedule, arch)


def drawn_build_for_hopper(random: Random, arch: str, dtype: str, number: int) -> Build:
    """The same for the kernels that only Hopper has: head dims and schedules that they are made for."""
    while True:
        # Four builds in a row have four head dims.
        dims = HEAD_DIMS[number % len(HEAD_DIMS)]
        mask, deterministic = drawn_mask(random), random.random() < 0.5
        spec = fg.AttentionSpec(dims[0], head_dim_v=dims[1], dtype=dtype, mask=mask, deterministic=deterministic)
        wish = random.choice((None, drawn_schedule_for_hopper(random), drawn_schedule_for_hopper(random)))
        if can_be_planned(spec, wish, arch):
            return Build(spec, wish, arch)


def drawn_schedule_for_hopper(random: Random) -> fg.Schedule:
    """Tiles, rings and a softmax of the forward kernel with specialised warps."""
    return fg.Schedule(
        tile_kv=random.choice((None, 32, 48, 64, 80, 96, 112, 128)),
        stages=random.choice((None, 2, 3, 4)),
        warps=fg.WarpPartition("specialized", producers=1, consumers=random.choice((2, 3))),
        algorithm="fa3",
        softmax=random.choice((None, "reference-max", "running-max")),
    )


def drawn_spec(random: Random, dtype: str) -> fg.AttentionSpec:
    if dtype == "e4m3":
        return drawn_spec_of_eight_bits(random)
    dim = drawn_dim(random)
    return fg.AttentionSpec(
        dim,
        head_dim_v=random.choice((dim, dim, drawn_dim(random))),
        dtype=dtype,
        mask=drawn_mask(random),
        deterministic=random.random() < 0.5,
        dropout=random.random() < 0.2,
        varlen=random.random() < 0.2,
    )


def drawn_spec_of_eight_bits(random: Random) -> fg.AttentionSpec:
    dim = random.choice(EIGHT_BIT_DIMS)
    return fg.AttentionSpec(
        dim,
        head_dim_v=random.choice((dim, dim, random.choice(EIGHT_BIT_DIMS))),
        dtype="e4m3",
        out_dtype=random.choice((None, "bf16", "fp16")),
        mask=drawn_mask(random),
        direction="forward",
        varlen=random.random() < 0.3,
        scale_block=random.choice((None, 64, 128)),
    )


def test_rings_of_any_length_are_built_with_a_mask() -> None:
    for stages in (2, 3, 4):
        schedule = fg.Schedule(tile_kv=32, stages=stages, algorithm="fa3")
        spec = fg.AttentionSpec(64, mask=fg.causal(), direction="forward")
        load(render(plan(spec, schedule, "sm_90a").kernel("forward")))


def drawn_dim(random: Random) -> int:
    return random.choice((random.randint(1, 48), random.choice(DIMS), random.choice(DIMS), random.randint(1, 256)))


def drawn_mask(random: Random) -> fg.Mask:
    def distance() -> int | None:
        return random.choice((None, random.randint(0, 40)))

    causal = fg.causal(random.choice(("bottom-right", "top-left")))
    window = fg.window(distance(), distance(), align=random.choice(("bottom-right", "top-left")))
    return random.choice((fg.full(), causal, window, causal & window))


def drawn_schedule(random: Random) -> fg.Schedule:
    """Tiles in which every warp has its share; fields may be left to the plan."""
    kind, count = random.choice(("split_q", "split_q", "split_k")), random.choice((1, 2, 4))
    fields = {
        "tile_q": random.choice((16, 32)) * (count if kind == "split_q" else 1),
        "tile_kv": random.choice((16, 32, 48, 64)) * (count if kind == "split_k" else 1),
        "stages": random.choice((1, 2, 3)),
    }
    fields.pop(random.choice(("", "", *fields)), None)
    backward = fg.BackwardSchedule(
        tile_q=random.choice((None, 16, 32, 64, 96)),
        tile_kv=random.choice((None, 16, 32, 64, 80, 128)),
        stages=random.choice((None, 1, 2)),
        warps=random.choice((None, 1, 2, 4, 8)),
    )
    return fg.Schedule(**fields, warps=fg.WarpPartition(kind, count), backward=backward)


def can_be_planned(spec: fg.AttentionSpec, schedule: fg.Schedule | None, arch: str) -> bool:
    try:
        plan(spec, schedule, arch)
    except fg.PlanError:
        return False
    return True


def mode_of(index: int) -> Mode:
    """A fifth of the cases in race mode, and a fifth in an order drawn from a seed; some are both."""
    plain, *others = modes(0, index, schedules=2)
    if index % 5 == 1:
        plain = others[index // 5 % 2]
    return replace(plain, race=index % 5 == 3 or index % 25 == 1)


def counts(modes_done: list[Mode]) -> Counter[str]:
    """Cases of each kind."""
    found = Counter(cases=len(modes_done))
    found["race"] = sum(mode.race for mode in modes_done)
    found["drawn order"] = sum(mode.schedule in ("random", "priority") for mode in modes_done)
    return found


BUILDS, CASES = LEVELS[LEVEL]
#: A developer's run is content with a few groups.
DONE = some(GROUPS, ("sm_75", "fp16"), ("sm_80", "fp32"), ("sm_90a", "bf16"), ("sm_89", "e4m3"))
LINEAGE_DONE = some(LINEAGE_GROUPS, ("sm_80", "bf16", "standard"))
#: The number of the first build: what is drawn for it and those after it differs from number to number.
FIRST = int(os.environ.get("DRAWN_FIRST", "0"))


@pytest.mark.parametrize("number", range(FIRST, FIRST + BUILDS))
@pytest.mark.parametrize(("arch", "dtype"), DONE)
def test_every_result_is_within_its_bound_and_nothing_is_found(
    arch: str, dtype: str, number: int, record: Callable[[dict[str, Any]], None]
) -> None:
    record({"arch": arch, "dtype": dtype, **counts(tried(drawn_build(arch, dtype, number), number))})


@pytest.mark.parametrize("number", range(FIRST, FIRST + BUILDS))
@pytest.mark.in_turns(12)
@pytest.mark.parametrize(("arch", "dtype", "algorithm"), LINEAGE_DONE)
def test_so_is_every_result_of_the_algorithms_that_others_are_compared_with(
    arch: str, dtype: str, algorithm: str, number: int
) -> None:
    tried(drawn_build_of(algorithm, arch, dtype, number), number)


def tried(build: Build, number: int) -> list[Mode]:
    """Runs the cases that are drawn for a build, and fails with the smallest one that fails; how each was run."""
    subject = Subject(build.plan, build.schedule, None)
    tiles, done, tally = Tiles.of(build.plan.schedule), [], Tally()
    for index in range(CASES):
        case, mode = draw(build.spec, tiles, number, index), mode_of(index)
        verdict = subject.run(subject.expect(case), mode)
        if verdict.kind:
            pytest.fail(describe_failure(subject.smallest(Trial(case, mode), verdict)), pytrace=False)
        tally.add(verdict.results)
        done.append(mode)
    failure = systematic_failure(subject, tally, Wish(CASES, seed=number))
    if failure is not None:
        pytest.fail(describe_failure(failure), pytrace=False)
    return done


@pytest.mark.parametrize(
    ("level", "cases", "race", "drawn_order"), [("ci", 1000, 200, 200), ("nightly", 10**5, *[20_000] * 2)]
)
def test_as_many_cases_are_done_as_is_promised(level: str, cases: int, race: int, drawn_order: int) -> None:
    builds, each = LEVELS[level]
    done = counts([mode_of(index) for index in range(each)])
    all_builds = builds * len(GROUPS)
    assert all_builds * done["cases"] >= cases
    assert all_builds * done["race"] >= race
    assert all_builds * done["drawn order"] >= drawn_order


def test_the_cases_of_ci_reach_every_kernel_dtype_mask_partition_and_family_of_architectures() -> None:
    builds = [drawn_build(arch, dtype, number) for arch, dtype in GROUPS for number in range(LEVELS["ci"][0])]
    plans = [build.plan for build in builds]
    assert {kernel.role for made in plans for kernel in made.kernels} == {
        "forward",
        "prepare",
        "main",
        "query",
        "clear_gaps",
        "finish",
        "repair",
        "quantize",
    }
    assert {made.spec.dtype for made in plans} == {"fp16", "bf16", "fp32", "e4m3"}
    assert {made.spec.scale_block for made in plans} == {None, 64, 128}
    assert {made.schedule.warps.kind for made in plans if made.schedule.warps} == {
        "split_q",
        "split_k",
        "specialized",
    }
    assert {made.kernel("forward").algorithm for made in plans} == {"FlashAttention-2", "FlashAttention-3"}
    assert {made.schedule.softmax for made in plans} == {None, "reference-max", "running-max"}
    assert {made.schedule.warps.consumers for made in plans if made.schedule.softmax} == {2, 3}
    masks = [made.spec.mask for made in plans]
    assert {(mask.has_lower, mask.has_upper) for mask in masks} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    assert any(not mask.top_left.is_full for mask in masks)
    assert any(not mask.bottom_right.is_full for mask in masks)
    assert {family(made.arch) for made in plans} == {family(arch) for arch in ARCHS.values()}


def test_the_cases_of_ci_reach_every_kernel_of_the_algorithms_that_others_are_compared_with() -> None:
    every = range(LEVELS["ci"][0])
    plans = [drawn_build_of(name, arch, dtype, n).plan for arch, dtype, name in LINEAGE_GROUPS for n in every]
    assert {kernel.role for made in plans for kernel in made.kernels} >= {
        *("scores", "softmax", "forward", "prepare", "ds", "dv", "dq", "dk")
    }
    assert {made.spec.dtype for made in plans} == {"fp16", "bf16", "fp32"}
    assert {made.spec.dropout for made in plans} == {False, True}
    assert {made.spec.mask.is_full for made in plans} == {False, True}


def family(arch: Arch) -> tuple[Any, ...]:
    """What makes a plan for one architecture unlike that for another."""
    facts = (arch.has_wgmma, arch.has_cp_async, arch.has_bf16, arch.has_vector_reduction, arch.spills_wide_tiles)
    return (*facts, arch.max_smem_per_block)
