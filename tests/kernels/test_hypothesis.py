"""Hypothesis draws all of it: spec, schedule, architecture, problem, and the order in which threads run.

Beside ``test_properties.py``, which draws bands only, and ``test_masks.py``, which draws expressions, this one
composes masks and scores from the named ones. A compiler run costs as much as many launches, so a build is drawn
with several trials, and from a family that is small: what shrinking tries is mostly compiled already. A failure
ends with the smallest trial that fails, and the command that repeats it.

How many builds there are says DRAWN_CASES, as for the drawn cases; they are the same in every run.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import and_, invert, or_
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, note, seed, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.arch import get_arch
from flashgen.plan import plan
from flashgen.plan.model.plans import AttentionPlan
from flashgen.spec import Mask, Score
from flashgen.spec.text.command import rebuild_command
from flashgen.verify import Case, Mode, Tally, Tiles, Trial, expect, run_case, trial_text
from flashgen.verify.cases.layouts import LAYOUTS
from flashgen.verify.trial import ORDERS, SIDES
from tests.drawn import IS_SAMPLE, LEVEL, some

ARCHS = ("sm_80", "sm_75", "sm_90a")
#: Each part starts afresh from a seed of its own, and has no more builds than Hypothesis draws before it turns to
#: variations of what it has drawn.
PARTS = {"sample": 1, "ci": 12, "nightly": 500}[LEVEL]
#: A developer's run stops sooner.
BUILDS = 4 if IS_SAMPLE else 10
MOST_TRIALS = 8
#: Several tiles of most schedules, and still quick to emulate.
LONGEST = 200
#: The most pairs of a query and a key, over all heads.
MOST_PAIRS = 40_000


@dataclass(frozen=True)
class Build:
    """What is compiled."""

    spec: fg.AttentionSpec
    schedule: fg.Schedule | None
    arch: str

    @cached_property
    def plan(self) -> AttentionPlan:
        return plan(self.spec, self.schedule, self.arch)

    def check_command(self, trial: Trial) -> str:
        """What runs a trial of it again."""
        options = rebuild_command(self.spec, self.schedule, self.arch).removeprefix("flashgen build ")
        return f"flashgen check {options} --case {shlex.quote(trial_text(trial))}"


# ---- What is computed. What stands first is the simplest: there the search for a small failure ends.


def declared(dtype: type, rank: int) -> np.ndarray[Any, Any]:
    """A tensor to be captured; each case draws its own values and sizes."""
    return np.zeros((2,) * rank, dtype)


ALIGNMENTS = st.sampled_from(["bottom-right", "top-left"])
DISTANCES = st.sampled_from([None, 0, 1, 15, 16, 40])
COUNTS = st.sampled_from([1, 5, 16, 50])
BANDS = st.one_of(
    st.builds(fg.causal, ALIGNMENTS),
    st.builds(lambda left, right, align: fg.window(left, right, align=align), DISTANCES, DISTANCES, ALIGNMENTS),
)
NAMED_MASKS = st.one_of([st.builds(f, COUNTS) for f in (fg.prefix_lm, fg.dilated, fg.global_tokens, fg.chunked)])
CAPTURED_MASKS = st.sampled_from(
    [
        fg.key_padding(declared(np.int32, 1)),
        fg.document(declared(np.int32, 2)),
        fg.document(declared(np.int64, 2), declared(np.int64, 2)),
        fg.prefix_lm(declared(np.int32, 1)),
        fg.block_sparse(declared(np.bool_, 2), 16),
        fg.block_sparse(declared(np.int8, 3), (16, 32)),
        Mask.of(lambda b, h, q, k: (h % 2 == 0) | (q >= k)),
    ]
)


def combined(masks: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    """Masks that combine two, and what a mask forbids."""
    return st.builds(and_, masks, masks) | st.builds(or_, masks, masks) | st.builds(invert, masks)


MASKS = st.recursive(st.just(fg.full()) | BANDS | NAMED_MASKS | CAPTURED_MASKS, combined, max_leaves=3)
SINK = fg.sink(declared(np.float32, 1))
CHANGES = st.sampled_from(
    [
        fg.softcap(3.0),
        fg.alibi(declared(np.float32, 1)),
        fg.bias(declared(np.float16, 4)),
        fg.relative_bias(np.zeros((2, 9), np.float32)),
        Score.of(lambda s, b, h, q, k: fg.where(k % 3 == 0, s * 0.5, s)),
    ]
)
SCORES = st.one_of(CHANGES, st.just(SINK), st.builds(lambda one, two: one >> two, CHANGES, CHANGES | st.just(SINK)))
DIMS = st.sampled_from([16, 1, 33, 40, 64, 72, 128])
EIGHT_BIT_DIMS = st.sampled_from([16, 32, 64, 80, 128])


@st.composite
def specs(draw: st.DrawFn, arch: str) -> fg.AttentionSpec:
    score = draw(SCORES) if draw(st.sampled_from([False, False, True])) else None
    if get_arch(arch).multiplies_eight_bits and draw(st.sampled_from([False, False, True])):
        dim = draw(EIGHT_BIT_DIMS)
        return fg.AttentionSpec(
            dim,
            head_dim_v=draw(st.just(dim) | EIGHT_BIT_DIMS),
            dtype="e4m3",
            out_dtype=draw(st.sampled_from(["bf16", "fp16"])),
            mask=draw(MASKS),
            score=score,
            direction="forward",
            varlen=draw(st.sampled_from([False, False, False, True])),
            scale_block=draw(st.sampled_from([None, 64, 128])),
        )
    dtypes = ("fp16", "bf16", "fp32") if get_arch(arch).has_bf16 else ("fp16", "fp32")
    dim = draw(DIMS)
    return fg.AttentionSpec(
        dim,
        head_dim_v=draw(st.just(dim) | DIMS),
        dtype=draw(st.sampled_from(dtypes)),
        mask=draw(MASKS),
        score=score,
        direction="both" if draw(st.sampled_from([False, True, True])) else "forward",
        deterministic=draw(st.booleans()),
        dropout=draw(st.sampled_from([False, False, False, True])),
        varlen=draw(st.sampled_from([False, False, False, True])),
    )


# ---- How it is laid out

#: Algorithms that others are compared with; they cover the specs of bands alone.
COMPARED = ("standard",)
PARTITIONS = st.builds(fg.WarpPartition, st.sampled_from(["split_q", "split_k"]), st.sampled_from([1, 2, 4]))
STAGES = st.sampled_from([None, 1, 2, 3])
SCHEDULES = st.builds(
    fg.Schedule,
    tile_q=st.sampled_from([None, 16, 32, 64, 128]),
    tile_kv=st.sampled_from([None, 16, 48, 64, 128]),
    stages=STAGES,
    warps=st.none() | PARTITIONS,
    backward=st.builds(
        fg.BackwardSchedule,
        tile_q=st.sampled_from([None, 16, 32, 64]),
        tile_kv=st.sampled_from([None, 16, 64, 80]),
        stages=STAGES,
        warps=st.sampled_from([None, 1, 2, 4]),
    ),
)


@st.composite
def builds(draw: st.DrawFn) -> Build:
    """A spec with a schedule that can be planned: where one cannot, the plan chooses more of it."""
    arch = draw(st.sampled_from(ARCHS))
    # Hopper's kernels take few wishes.
    spec, wish = draw(specs(arch)), draw(st.just(fg.Schedule()) | SCHEDULES if arch == "sm_90a" else SCHEDULES)
    algorithm = draw(st.sampled_from([None, None, *COMPARED]))
    own_ring = replace(wish, stages=None, backward=replace(wish.backward, stages=None))
    wishes = (wish, own_ring, replace(wish, backward=fg.BackwardSchedule()), fg.Schedule(warps=wish.warps))
    wishes = wishes if algorithm is None else (fg.Schedule(algorithm=algorithm), *wishes)
    return Build(spec, next((wish for wish in wishes if can_be_planned(spec, wish, arch)), None), arch)


def can_be_planned(spec: fg.AttentionSpec, schedule: fg.Schedule | None, arch: str) -> bool:
    try:
        plan(spec, schedule, arch)
    except fg.PlanError:
        return False
    return True


# ---- What it is run on, and how


@st.composite
def trials(draw: st.DrawFn, build: Build) -> Trial:
    tiles = Tiles.of(build.plan.schedule)
    # Each number is drawn by itself and then fitted in, so that each can become smaller by itself.
    len_q, more_keys = draw(st.integers(0, LONGEST)), draw(st.integers(-LONGEST, LONGEST))
    if draw(st.booleans()):
        len_q = awkward(len_q, tiles.q, tiles.backward_q)
    len_kv = min(max(len_q + more_keys, 0), LONGEST)
    if draw(st.booleans()):
        len_kv = awkward(len_kv, tiles.kv, tiles.backward_kv)
    room = max(MOST_PAIRS // max(len_q * len_kv, 1), 1)
    batch = min(draw(st.sampled_from([1, 2, 0, 3])), room)
    heads_kv = min(draw(st.sampled_from([1, 2, 0])), room // max(batch, 1))
    group = min(draw(st.sampled_from([1, 2, 3])), room // max(batch * heads_kv, 1))
    layouts = st.sampled_from(LAYOUTS)
    non_finite = st.sampled_from(["nothing", "nothing", "keys", "queries"])
    case = Case(
        "drawn",
        len_q,
        len_kv,
        batch=batch,
        heads=heads_kv * group,
        heads_kv=heads_kv,
        fill=draw(st.sampled_from(["normal", "sparse", "spread", "huge", "large_logits", "flat"])),
        scale=draw(st.sampled_from([None, 1.0, 0.01])),
        layouts=(draw(layouts), draw(layouts), draw(layouts), draw(layouts)),
        # With nothing masked, a key that is not finite reaches everything, and nothing is left to compare.
        non_finite="nothing" if build.spec.mask.is_full else draw(non_finite),
        seed=draw(st.integers(0, 2**16 - 1)),
        dlse=build.spec.needs_backward and draw(st.booleans()),
    )
    return Trial(case, draw(modes()))


def awkward(length: int, *tiles: int) -> int:
    """One of the lengths that are awkward, none, one, and about a tile or two: a smaller one for a smaller length."""
    near = {count * tile + more for tile in tiles for count in (1, 2) for more in (-1, 0, 1)}
    found = sorted(n for n in {0, 1} | near if n <= LONGEST)
    return found[length * len(found) // (LONGEST + 1)]


@st.composite
def modes(draw: st.DrawFn) -> Mode:
    order, number = draw(st.sampled_from(ORDERS)), draw(st.integers(0, 2**16 - 1))
    race = draw(st.sampled_from([False, False, False, True]))
    return Mode(order, number if order in ("random", "priority") else 0, race, draw(st.sampled_from(SIDES)))


@st.composite
def builds_with_trials(draw: st.DrawFn) -> tuple[Build, list[Trial]]:
    build = draw(builds())
    return build, draw(st.lists(trials(build), min_size=1, max_size=MOST_TRIALS))


# ---- Tests


def wrong(build: Build, trial: Trial) -> list[str]:
    """What a trial's results have wrong, a sentence for each; what the emulator finds is an EmulationError."""
    kernel = fg.build(build.spec, build.schedule, arch=build.arch, target="emulator")

    def run(q: Any, k: Any, v: Any, do: Any, scale: float, dlse: Any = None, **more: Any) -> Sequence[Any]:
        out, lse = kernel(q, k, v, scale=scale, **more)
        gradients = () if do is None else kernel.backward(do, q, k, v, out, lse, scale=scale, dlse=dlse, **more)
        return out, lse, *gradients

    kernel.target.options = trial.mode.options
    try:
        results = run_case(run, build.spec, expect(build.spec, trial.case, any_values=True))
    finally:
        kernel.target.options = {}
    tally = Tally()
    tally.add(results)
    wrong = [result.describe() for result in results if not result.check.ok]
    return wrong or [report.describe_slope() for report in tally.systematic()]


@pytest.mark.in_turns(24)
@pytest.mark.parametrize("number", range(PARTS))
def test_whatever_is_drawn_agrees_with_the_oracle(number: int) -> None:
    @seed(number)
    @settings(
        max_examples=BUILDS, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(builds_with_trials())
    def agrees(drawn: tuple[Build, list[Trial]]) -> None:
        build, several = drawn
        for trial in several:
            note(f"Runs: {build.check_command(trial)}")
            assert wrong(build, trial) == []

    agrees()


def find_drawn(wanted: Callable[[Build, Trial], bool], *phases: Phase) -> tuple[Build, list[Trial]]:
    """Something that is drawn, with a trial that is wanted."""
    return find(
        builds_with_trials(),
        lambda drawn: any(wanted(drawn[0], trial) for trial in drawn[1]),
        settings=settings(max_examples=2000, derandomize=True, database=None, phases=phases),
    )


ONE = Case("drawn", 0, 0)
SMALLEST: dict[str, tuple[Callable[[Case], bool], Case]] = {
    "any": (lambda case: True, ONE),
    "several tiles": (lambda case: case.len_kv > 40 and case.len_q > 0, replace(ONE, len_q=1, len_kv=41)),
    "a group": (lambda case: case.heads > case.heads_kv, replace(ONE, heads=2)),
    "non-finite keys": (
        lambda case: case.non_finite == "keys" and case.batch == 2,
        replace(ONE, non_finite="keys", batch=2),
    ),
}
REACHED: dict[str, Callable[[Build, Trial], bool]] = {
    **{arch: lambda build, trial, arch=arch: build.arch == arch for arch in ARCHS},
    "a band from the top left": lambda build, trial: not build.spec.mask.top_left.is_full,
    "a captured mask": lambda build, trial: bool(build.spec.mask.traced.tensors) and build.spec.needs_backward,
    "a sink": lambda build, trial: build.spec.score is not None and build.spec.score.sink is not None,
    "split-k": lambda build, trial: getattr(build.plan.schedule.warps, "kind", None) == "split_k",
    "race mode, dims apart": lambda build, trial: trial.mode.race and build.spec.head_dim != build.spec.head_dim_v,
    "the kernel for Hopper": lambda build, trial: build.plan.kernel("forward").algorithm == "FlashAttention-3",
    "standard attention": lambda build, trial: build.plan.stores_probabilities and build.spec.needs_backward,
    "dropout backward": lambda build, trial: build.spec.dropout and build.spec.needs_backward,
    "packed sequences, masked": lambda build, trial: build.spec.varlen and not build.spec.mask.is_band,
    "8 bits with a score": lambda build, trial: build.spec.element.is_eight_bit and build.spec.score is not None,
    "8 bits, packed, with blocks of scales": lambda build, trial: build.spec.varlen and bool(build.spec.scale_block),
    "no heads": lambda build, trial: trial.case.heads == 0 and trial.case.len_q > 0,
    "one query, no keys": lambda build, trial: (trial.case.len_q, trial.case.len_kv) == (1, 0),
    "a gradient of the log-sum-exp": lambda build, trial: trial.case.dlse,
    "a stride that 32 bits cannot hold": lambda build, trial: trial.case.layouts[1] == "huge-head-stride",
    "four layouts": lambda build, trial: len(set(trial.case.layouts)) == 4,
}


@pytest.mark.in_turns(12)
@pytest.mark.parametrize("name", some(SMALLEST, "several tiles"))
def test_a_failure_shrinks_to_a_small_one(name: str) -> None:
    wanted, smallest = SMALLEST[name]
    _, found = find_drawn(lambda build, trial: wanted(trial.case), Phase.generate, Phase.shrink)
    assert found[-1] == Trial(smallest)
    assert set(found[:-1]) <= {Trial(ONE)}


@pytest.mark.in_turns(12)
@pytest.mark.parametrize("name", some(REACHED, *list(REACHED)[::4]))
def test_what_is_drawn_reaches(name: str) -> None:
    find_drawn(REACHED[name], Phase.generate)
