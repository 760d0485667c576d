"""Bugs that small problems hide: the cases that ``flashgen check`` draws by itself catch them, whatever the seed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import flashgen as fg
from flashgen.cli.commands.check import DEFAULT_CASES
from flashgen.cli.commands.checking import INACCURATE, Subject
from flashgen.common.recent import Recent
from flashgen.plan import plan
from flashgen.render import render
from flashgen.spec import AttentionSpec
from flashgen.verify import Case, Mode, Tiles, cases_for, draw

#: Of the cases that could catch a bug, so many are run.
MOST_RUNS = 4
IDS = np.zeros((2, 2), np.int32)


@dataclass(frozen=True)
class Bug:
    """``old`` becomes ``new`` in the kernels of some roles, and which cases it may show in."""

    spec: AttentionSpec
    old: str
    new: str
    shows_in: Callable[[Case], bool]
    roles: tuple[str, ...] = ("forward",)
    arch: str = "sm_80"
    schedule: fg.Schedule | None = field(default=None)


def forward(**options: object) -> AttentionSpec:
    return AttentionSpec(16, dtype="fp16", direction="forward", **options)  # type: ignore[arg-type]


BOTH = AttentionSpec(16, dtype="fp16", dropout=True)
REPEATS = ("q / 16 * 8", "q % 256 / 16 * 8")
KEYS = "const Range keys = mask.key_tiles(first_q, end_q, kConfig.tile_kv);"
FEWER_KEYS = (
    KEYS.replace("keys = mask", "all = mask") + " const Range keys{all.begin, smaller(all.end, all.begin + 32)};"
)
NARROW = fg.Schedule(tile_kv=64)
BUGS = {
    "dropout repeats after 256 queries": Bug(BOTH, *REPEATS, lambda case: case.len_q > 256, roles=("forward", "main")),
    "dropout of packed sequences repeats after 256 queries": Bug(
        forward(varlen=True, dropout=True), *REPEATS, lambda case: case.len_q > 256
    ),
    "dropout differs between passes beyond key 256": Bug(
        BOTH, "k / 16 * 4", "k % 256 / 16 * 4", lambda case: case.len_kv > 256, roles=("main",)
    ),
    "a mask of documents walks 32 tiles of keys": Bug(
        forward(mask=fg.document(IDS)), KEYS, FEWER_KEYS, lambda case: case.len_kv > 32 * 64, schedule=NARROW
    ),
    "an expression walks 32 tiles of keys": Bug(
        forward(mask=fg.causal() & fg.dilated(3)), KEYS, FEWER_KEYS, lambda case: case.len_kv > 32 * 64, schedule=NARROW
    ),
    "offset of K's head in 32 bits": Bug(
        forward(),
        "head_kv * p.k_head",
        "head_kv * static_cast<i32>(p.k_head)",
        lambda case: case.layouts[1] == "huge-head-stride",
    ),
    "offset of a packed row of V in 32 bits": Bug(
        forward(varlen=True),
        "packed.first_key * p.v_row",
        "packed.first_key * static_cast<i32>(p.v_row)",
        lambda case: case.layouts[2] == "huge-row-stride",
    ),
    "offset of a page in 32 bits": Bug(
        forward(cache="paged"),
        "own_page * page_stride + own_row * row_stride",
        "static_cast<i32>(own_page) * static_cast<i32>(page_stride) + own_row * row_stride",
        lambda case: case.layouts[1] == "huge-batch-stride",
        roles=("decode",),
    ),
    "values of another sequence where there are more than two": Bug(
        forward(),
        "p.v + place.sequence * p.v_batch",
        "p.v + place.sequence % 2 * p.v_batch",
        lambda case: case.batch > 2,
    ),
    "the gradient of LSE has the wrong sign": Bug(
        AttentionSpec(16, dtype="fp16", mask=fg.causal(), deterministic=True),
        "total -= p.dlse[number]",
        "total += p.dlse[number]",
        lambda case: case.dlse,
        roles=("prepare",),
    ),
    "the gradient of LSE has the wrong sign on Hopper": Bug(
        AttentionSpec(64, mask=fg.causal()),
        "total -= dlse",
        "total += dlse",
        lambda case: case.dlse,
        roles=("prepare",),
        arch="sm_90a",
    ),
}


@pytest.fixture(params=BUGS)
def planted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Bug, Subject]:
    """A bug, and the kernels that have it."""
    bug = BUGS[request.param]
    made = plan(bug.spec, bug.schedule, bug.arch)
    for role in bug.roles:
        source = render(made.kernel(role))  # type: ignore[arg-type]
        pattern = r"\s+".join(re.escape(word) for word in bug.old.split())
        text, count = re.subn(pattern, lambda _: bug.new, source.text, count=1)
        assert count, f"the {role} kernel no longer says {bug.old!r}; adapt the bug"
        (tmp_path / f"{source.name}.cu").write_text(text, encoding="utf-8")
    monkeypatch.setenv("FLASHGEN_OVERRIDE_DIR", str(tmp_path))
    monkeypatch.setattr("flashgen.api._kernels", Recent(2))
    return bug, Subject(made, bug.schedule, None)


def test_the_cases_that_check_draws_catch_it(planted: tuple[Bug, Subject]) -> None:
    bug, subject = planted
    tiles = Tiles.of(subject.plan.schedule)
    for seed in range(4):
        drawn = (draw(bug.spec, tiles, seed, index) for index in range(DEFAULT_CASES))
        # Less aligned arrays have kernels of their own.
        able = [case for case in drawn if bug.shows_in(case) and "unaligned" not in case.layouts]
        able.sort(key=lambda case: case.fill != "normal")
        kinds = (subject.run(subject.expect(case), Mode()).kind for case in able[:MOST_RUNS])
        assert INACCURATE in kinds, (seed, len(able))


def test_a_standard_case_of_a_build_catches_it(planted: tuple[Bug, Subject]) -> None:
    bug, subject = planted
    schedule = subject.plan.schedule
    standard = cases_for(bug.spec, tile_q=schedule.tile_q or 64, tile_kv=schedule.tile_kv or 64)
    able = [case for case in standard if bug.shows_in(case)]
    assert INACCURATE in [subject.run(subject.expect(case), Mode()).kind for case in able]
