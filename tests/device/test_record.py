"""The GPU's answers, replayed: the emulator gives the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from conformance import emulated
from conformance.cases import CASES, FAMILIES
from conformance.digest import digest
from conformance.records import RECORD, decode, encode, recorded, save, shortcomings

ENTRIES = {name: entry for family in FAMILIES for name, entry in recorded(family).items() if name in CASES}
REMEDY = "on a machine with an H100 or H200: python tests/device/record.py"
SOUND: dict[str, list[str]] = {"not recorded": [], "changed since": [], "gone": []}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_emulator_gives_the_recorded_answer(name: str) -> None:
    case = CASES[name]
    assert case.disagreements(ENTRIES[name].outputs, emulated.run(case)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_has_a_record_of_what_it_is_now(family: str) -> None:
    assert shortcomings(FAMILIES[family], recorded(family)) == SOUND, REMEDY


def test_every_recorded_file_belongs_to_a_family() -> None:
    assert {path.stem for path in RECORD.glob("*.json")} <= set(FAMILIES)


def test_an_answer_to_what_a_case_was_before_is_noticed(tmp_path: Path) -> None:
    case = CASES["vote/warp"]
    before = dataclasses.replace(case, inputs={"x": case.inputs["x"] ^ 1})
    answers = {c.name: {"digest": digest(c), "outputs": encode(c.outputs)} for c in (case, CASES["vote/block"])}
    save(tmp_path / "warp.json", {}, answers)
    entries = recorded("warp", tmp_path)
    assert shortcomings([case, CASES["vote/block"]], entries) == SOUND
    assert shortcomings([before, CASES["vote/ballot"]], entries) == {
        "not recorded": ["vote/ballot"],
        "changed since": ["vote/warp"],
        "gone": ["vote/block"],
    }


def test_arrays_survive_being_recorded() -> None:
    outputs = {
        "a": np.arange(60, dtype=np.float32).reshape(3, 4, 5) * np.float32(np.pi),
        "b": np.array([np.nan, -0.0, np.inf], np.float16),
        "c": np.arange(7, dtype=np.uint8),
    }
    back = decode(encode(outputs))
    assert {n: (v.dtype, v.shape, v.tobytes()) for n, v in back.items()} == {
        n: (v.dtype, v.shape, v.tobytes()) for n, v in outputs.items()
    }


def test_the_documentation_counts_the_cases() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "conformance.md").read_text(encoding="utf-8")
    counted = dict(re.findall(r"^\| (\w+) \| (\d+) \|", page, re.M))
    assert counted == {family: str(len(cases)) for family, cases in FAMILIES.items()}
