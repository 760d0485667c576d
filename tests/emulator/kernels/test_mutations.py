"""Bugs planted in the project's own kernels, each with the modes that catch it. Without a bug nothing is
reported: the same cases run clean, here and in test_clean.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from flashgen.errors import EmulationError
from flashgen.plan.model.plans import Role
from tests.drawn import IS_SAMPLE, some
from tests.emulator.kernels.mutation_cases import CASES

pytestmark = pytest.mark.in_turns(24)


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` where it first stands after ``anchor`` in the source of one kernel.

    An ellipsis in ``old`` stands for any one name, and in ``new`` for the same one.
    """

    name: str
    role: Role
    case: str
    old: str
    new: str
    anchor: str = ""
    caught_by: Sequence[str] = ("plain", "random", "race")

    def plant(self, text: str) -> str:
        start = self._find(text, self.anchor, 0).end() if self.anchor else 0
        place = self._find(text, self.old, start)
        return text[: place.start()] + self.new.replace("…", place.group("name") or "") + text[place.end() :]

    def _find(self, text: str, words: str, start: int) -> re.Match[str]:
        """Where these words stand, however the lines are broken."""
        pattern = r"\s+".join(re.escape(word) for word in words.split())
        pattern = pattern.replace("…", r"(?P<name>\w+)") if "…" in pattern else f"{pattern}(?P<name>)"
        found = re.compile(pattern).search(text, start)
        assert found, f"{self.name}: the kernels no longer say {words!r}; adapt the mutation"
        return found


with (Path(__file__).parent / "mutations.toml").open("rb") as file:
    MUTATIONS = [Mutation(**row) for row in tomllib.load(file)["mutation"]]
#: Building kernels takes long: of the bugs in cases whose names begin so, a developer's run plants every so many, and
#: DRAWN_CASES=ci all.
SAMPLED = {
    "Hopper": 16,
    "standard": 6,
    "dropout": 4,
    "packed": 4,
    "cached": 4,
    "decode": 4,
    "prefill": 4,
    "latent": 4,
    "ring": 5,
    "grouped": 4,
    "huge row stride": 3,
    "one stage": 2,
    "empty": 2,
}


def rare() -> set[str]:
    if not IS_SAMPLE:
        return set()
    found = set()
    for begin, every in SAMPLED.items():
        names = [mutation.name for mutation in MUTATIONS if mutation.case.startswith(begin)]
        found |= set(names) - set(names[::every])
    return found


RARE = rare()
PLANTED = [mutation for mutation in MUTATIONS if mutation.name not in RARE]
PLANTED = some(PLANTED, *PLANTED[::2])
MODES: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "random": [{"schedule": "random", "seed": seed} for seed in range(3)],
    "race": [{"race": True}],
}


def modes_of(number: int) -> list[str]:
    """All modes with DRAWN_CASES=ci. A developer's run watches the accesses of every other kernel."""
    return list(MODES) if not IS_SAMPLE else ["plain", "random"] if number % 2 else ["race"]


def identity(text: str) -> str:
    return text


def outcome(check: Callable[..., list[str]], case: Any, mutation: Mutation | None, role: Role, mode: str) -> str:
    """What a mode says of a planted bug; empty when it says nothing."""
    plant = mutation.plant if mutation else identity
    for options in MODES[mode]:
        try:
            wrong = check(case, {role: plant}, **options)
        except EmulationError as error:
            return str(error)
        if wrong:
            return "; ".join(wrong)
    return ""


@pytest.mark.parametrize("mutation", PLANTED, ids=lambda m: f"{m.role}: {m.name}")
def test_a_planted_bug_is_caught(check: Any, case: Any, mutation: Mutation) -> None:
    spec, lengths, fields = CASES[mutation.case]
    planted = case(spec, *lengths, **fields)
    found = {mode: outcome(check, planted, mutation, mutation.role, mode) for mode in modes_of(PLANTED.index(mutation))}
    assert [mode for mode in found if found[mode]] == [mode for mode in found if mode in mutation.caught_by], found


CLEAN = sorted({mutation.case for mutation in PLANTED})
CLEAN = some(CLEAN, *CLEAN[::3])


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for i, name in enumerate(CLEAN) for mode in modes_of(i)])
def test_without_a_bug_nothing_is_reported(check: Any, case: Any, name: str, mode: str) -> None:
    spec, lengths, fields = CASES[name]
    clean = case(spec, *lengths, **fields)
    for role in {mutation.role for mutation in PLANTED if mutation.case == name}:
        assert outcome(check, clean, None, role, mode) == ""
