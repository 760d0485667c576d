"""Bugs planted where dQ is added in a fixed order. None of them makes a sum wrong, so that it is the bits that show
them, or that nobody can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from flashgen.errors import EmulationError
from flashgen.plan.model.plans import Role
from flashgen.spec import AttentionSpec, Mask, causal, full
from tests.drawn import some
from tests.emulator.kernels.conftest import Case, Run

Edit = Callable[[str], str]
ORDERS: list[dict[str, Any]] = [
    {"schedule": "sequential"},
    {"schedule": "reverse", "resident": 2},
    *({"schedule": "random", "seed": seed, "resident": 2} for seed in range(4)),
    *({"schedule": "priority", "seed": seed, "resident": 1 + seed % 2} for seed in range(4)),
]
#: The second of four tiles of keys has none that is attended to.
BLOCK_SPARSE = Mask.of(lambda b, h, q, k: (k < 100) | (k >= 300))
DEADLOCK = "no thread can run"


class Bug(NamedTuple):
    """``old`` becomes ``new`` where it first stands after ``anchor``; then bits differ, unless it says ``words``."""

    mask: Mask
    anchor: str
    old: str
    new: str
    words: str = ""
    role: Role = "main"

    def plant(self, text: str) -> str:
        start = text.index(self.anchor)
        assert self.old in text[start:], f"the kernel no longer says {self.old!r}; adapt the bug"
        return text[:start] + text[start:].replace(self.old, self.new, 1)


BUGS = {
    "nobody waits for a turn": Bug(full(), "void add_step(", "wait_turn(turns, turn);", ""),
    "the next one's turn comes before the addition is complete": Bug(full(), "void add_step(", "bulk_wait<0>();", ""),
    "the last one to add is taken for the first": Bug(
        causal(), "u32 turn_of(const Mask& mask", "? static_cast<u32>(key_tile) : 0", "? 0 : 0", DEADLOCK
    ),
    "a tile between is counted that does not add": Bug(
        BLOCK_SPARSE,
        "u32 end_of_adding(",
        "static_cast<u32>(left - lowest_bit(found))",
        "static_cast<u32>(left)",
        DEADLOCK,
    ),
    "turns begin with what was there": Bug(
        full(), "may do so.", "thread_idx() == 0", "thread_idx() < 0", DEADLOCK, "prepare"
    ),
    "the first tiles are nobody's yet": Bug(
        full(),
        "struct KeyTileProducer",
        "elected ? scheduler.draw() : 0",
        "elected ? (tile_at.count == 0 ? block_idx_x() : scheduler.draw() + grid_dim_x()) : 0",
        DEADLOCK,
    ),
}


def outcomes(bug: Bug, edit: Edit | None) -> tuple[set[bytes], set[str]]:
    """The different bits of the sums of dQ in different orders, and what the emulator says."""
    sums, findings = set(), set()
    for order in ORDERS:
        spec = AttentionSpec(64, mask=bug.mask, deterministic=True)
        run = Run(Case(spec, 300, 400, heads=1, heads_kv=1, arch="sm_90a"))
        edits = {bug.role: edit}
        run.launch("prepare", edits.get("prepare"))
        try:
            run.launch("main", edits.get("main"), **order)
        except EmulationError as error:
            findings.add(str(error))
        else:
            sums.add(run.arrays["dq_accum"].tobytes())
        if bug.words and any(bug.words in finding for finding in findings):
            break
    return sums, findings


@pytest.mark.parametrize("name", some(BUGS, *list(BUGS)[::2]))
def test_a_planted_bug_shows(name: str) -> None:
    bug = BUGS[name]
    sums, findings = outcomes(bug, bug.plant)
    if bug.words:
        assert any(bug.words in finding for finding in findings)
    else:
        # Whose turn was passed over is waited for.
        assert len(sums) > 1
        assert all(DEADLOCK in finding for finding in findings)


MASKS = {"full": full(), "causal": causal(), "block_sparse": BLOCK_SPARSE}


@pytest.mark.parametrize("name", some(MASKS, "causal"))
def test_without_a_bug_bits_are_the_same(name: str) -> None:
    sums, findings = outcomes(Bug(MASKS[name], "", "", ""), None)
    assert len(sums) == 1
    assert not findings
