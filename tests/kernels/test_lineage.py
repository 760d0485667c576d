"""The algorithms before FlashAttention-2: for any spec that they cover, results are within their bounds.

How much is done: DRAWN_CASES, as for the other drawn cases.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen.cli.commands.checking import Subject
from flashgen.cli.output.check_report import describe_failure
from flashgen.errors import PlanError
from flashgen.plan import plan
from flashgen.plan.lineage import LINEAGE, MAX_HEAD_DIM
from flashgen.plan.model.plans import AttentionPlan
from flashgen.verify import Mode, Tiles, Trial, draw, modes
from tests.drawn import LEVEL

pytestmark = pytest.mark.in_turns(12)

ALGORITHMS = ("naive", "fa1", "grid1d", "grid2d")
ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_120")
BUILDS, CASES = {"sample": (1, 6), "ci": (3, 16), "nightly": (40, 60)}[LEVEL]


def drawn_spec(random: Random, algorithm: str) -> fg.AttentionSpec:
    dim = random.choice((random.randint(1, MAX_HEAD_DIM), 64))
    mask = random.choice((fg.full(), fg.causal(), fg.causal("top-left"), fg.window(random.randint(0, 40), 3)))
    return fg.AttentionSpec(
        dim,
        head_dim_v=random.choice((dim, random.randint(1, MAX_HEAD_DIM))),
        dtype=random.choice(("fp16", "fp32")),
        mask=mask,
        direction="forward" if LINEAGE[algorithm].plan_backward is None else "both",
        deterministic=random.random() < 0.5,
        dropout=LINEAGE[algorithm].has_dropout and random.random() < 0.3,
    )


def drawn_schedule(random: Random, algorithm: str) -> fg.Schedule:
    fields = {"tile_q": random.choice((None, 16, 32, 64)), "tile_kv": random.choice((None, 64))}
    fields = {name: value for name, value in fields.items() if name in LINEAGE[algorithm].fields}
    return fg.Schedule(algorithm=algorithm, **fields)


def drawn_plan(random: Random, algorithm: str) -> tuple[AttentionPlan, fg.Schedule]:
    """The first plan that fits the architecture drawn with it, and its schedule: tiles may need too much memory."""
    for _ in range(20):
        spec, schedule = drawn_spec(random, algorithm), drawn_schedule(random, algorithm)
        with suppress(PlanError):
            return plan(spec, schedule, random.choice(ARCHS)), schedule
    pytest.fail(f"of 20 drawn schedules for {algorithm} none fits")


def mode_of(index: int) -> Mode:
    """Every third case in race mode, every third in an order drawn from a seed."""
    plain, *others = modes(0, index, schedules=2)
    return (plain, replace(plain, race=True), others[index // 3 % 2])[index % 3]


@pytest.mark.parametrize("number", range(BUILDS))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_result_is_within_its_bound_and_nothing_is_found(algorithm: str, number: int) -> None:
    random = Random(f"{algorithm} {number}")
    drawn, asked = drawn_plan(random, algorithm)
    subject = Subject(drawn, asked, None)
    for index in range(CASES):
        case, mode = draw(drawn.spec, Tiles.of(subject.plan.schedule), number, index), mode_of(index)
        verdict = subject.run(subject.expect(case), mode)
        if verdict.kind:
            pytest.fail(describe_failure(subject.smallest(Trial(case, mode), verdict)), pytrace=False)


def test_a_grid_that_does_not_fit_runs_in_three_launches_with_the_same_bits() -> None:
    spec = fg.AttentionSpec(32, dtype="fp32", mask=fg.causal(), direction="forward")
    kernel = fg.build(spec, fg.Schedule(algorithm="grid2d", tile_q=32, tile_kv=32), target="emulator")
    random = np.random.default_rng(5)
    q, k, v = (random.standard_normal((4, length, 2, 32), np.float32) for length in (40, 70, 70))
    o, lse = kernel(q, k, v)
    assert launches(kernel, q, k, v) == ["grid_maxima", "grid_products", "grid_merge"]
    for i in range(4):
        one = slice(i, i + 1), slice(None), slice(0, 1)
        assert launches(kernel, q[one], k[one], v[one]) == ["forward"]
        found = kernel(q[one], k[one], v[one])
        assert np.array_equal(found[0], o[one])
        assert np.array_equal(found[1], lse[i : i + 1, 0:1])


def launches(kernel: fg.Kernel, *arrays: np.ndarray) -> list[str]:
    """The roles of the kernels that a call runs."""
    _, call, *_ = kernel.executor.find_forward(*arrays)
    return [step.kernel.plan.role for step in call.steps]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_that_a_query_may_not_attend_to_do_not_reach_it(algorithm: str) -> None:
    spec = fg.AttentionSpec(16, dtype="bf16", mask=fg.causal(), direction="forward")
    kernel = fg.build(spec, fg.Schedule(algorithm=algorithm), target="emulator")
    random = np.random.default_rng(6)
    q, k, v = (random.standard_normal((1, 30, 1, 16)).astype(ml_dtypes.bfloat16) for _ in "qkv")
    expected, expected_lse = kernel(q, k, v)
    k[:, 20:], v[:, 20:] = np.nan, np.inf
    o, lse = kernel(q, k, v)
    assert np.array_equal(o[:, :20], expected[:, :20])
    assert np.array_equal(lse[..., :20], expected_lse[..., :20])
    assert np.isnan(o[:, 20:].astype(np.float32)).all()
