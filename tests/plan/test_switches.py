"""Switches are choices among texts of templates that nothing else of a plan says: few, and all of them matter."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

import flashgen as fg
from flashgen.errors import FlashgenError
from flashgen.plan import plan
from flashgen.plan.model.plans import AttentionPlan

ROOT = Path(__file__).resolve().parents[2]
READ = re.compile(r'"(\w+)"(?: (?:not )?in (?:\w+\.)*switches\b|: "\w+")')
IDS = np.zeros((2, 64), np.int32)
SLOPES = np.ones(4, np.float32)
ALLOWED = np.zeros((64, 64), bool)
MASKS = (
    fg.full(),
    fg.causal(),
    fg.window(64, 64),
    fg.document(IDS),
    fg.Mask.of(lambda b, h, q, k: (q + k) % 3 != 0),
    fg.Mask.of(lambda b, h, q, k: ALLOWED[q, k]),
)
SCORES = (
    None,
    *(fg.softcap(cap) for cap in (1.0, 30.0, 200.0, 1e4)),
    *(fg.Score.of(lambda s, b, h, q, k, cap=cap: cap * fg.tanh(s / cap)) for cap in (30.0, 75.0, 200.0)),
    fg.Score.of(lambda s, b, h, q, k: SLOPES[h] * fg.tanh(s / SLOPES[h])),
    fg.relative_bias(np.zeros((4, 127), np.float32)),
    fg.bias(np.zeros((64, 64), np.float16)),
    fg.alibi(SLOPES),
    fg.sink(SLOPES),
    *(fg.bias(np.zeros(shape, np.float32)) for shape in ((64, 64), (4, 64, 64), (2, 4, 64, 64))),
    fg.bias(ALLOWED.astype(np.float32)) >> fg.softcap(30.0),
)
OPTIONS = ({"deterministic": True}, {"dropout": True}, {"varlen": True})
CACHES = ("contiguous", "paged")
SCHEDULES = (fg.Schedule(softmax="running-max"), fg.Schedule(warps=fg.WarpPartition("split_k", 4)))


@cache
def switches_of_plans() -> set[str]:
    """What plans set: for every option on its own, with every mask and score."""
    return {switch for attention in plans() for kernel in attention.kernels for switch in kernel.switches}


def plans() -> Iterator[AttentionPlan]:
    for dtype, dim, mask in itertools.product(("bf16", "fp16"), (64, 96, 128, 192, 256), MASKS):
        for score in SCORES:
            yield from planned(fg.AttentionSpec(dim, dtype=dtype, mask=mask, score=score))
        for options in OPTIONS:
            yield from planned(fg.AttentionSpec(dim, dtype=dtype, mask=mask, **options))
    for kind in CACHES:
        yield from planned(fg.AttentionSpec(64, mask=fg.causal(), direction="forward", cache=kind))
        yield from planned(fg.AttentionSpec(64, direction="forward", cache=kind, cache_dtype="e4m3"))
    yield from planned(fg.AttentionSpec(128, dtype="e4m3", direction="forward"))
    for schedule in SCHEDULES:
        yield from planned(fg.AttentionSpec(64, mask=fg.causal()), schedule)


def planned(spec: fg.AttentionSpec, schedule: fg.Schedule | None = None) -> Iterator[AttentionPlan]:
    for arch in ("sm_75", "sm_80", "sm_89", "sm_90a"):
        try:
            yield plan(spec, schedule, arch)
        except FlashgenError:
            continue  # This combination has no kernels there.


def switches_read() -> set[str]:
    """The names that templates and planners ask for."""
    files = [*(ROOT / "templates").rglob("*.j2"), *(ROOT / "flashgen").rglob("*.py")]
    return {name for path in files for name in READ.findall(path.read_text(encoding="utf-8"))}


def test_every_switch_of_a_plan_is_read() -> None:
    assert sorted(switches_of_plans() - switches_read()) == []


def test_plans_have_few_switches() -> None:
    found = switches_of_plans()
    # What the spec, the config, the parameters or the form of the score say is no switch.
    assert 0 < len(found) <= 8, sorted(found)


def test_every_switch_that_a_template_reads_is_set_by_some_plan() -> None:
    tested = re.compile(r'"(\w+)" (?:not )?in plan\.switches')
    read = {name for path in (ROOT / "templates").rglob("*.j2") for name in tested.findall(path.read_text("utf-8"))}
    assert sorted(read - switches_of_plans()) == []
