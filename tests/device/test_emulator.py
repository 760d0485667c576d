"""Every case on the emulator: nothing is reported, and no schedule changes the answer."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import emulated
from conformance.cases import CASES

from flashgen.emulator.library import SCHEDULES
from tests.drawn import some

#: All but what is compared with: the first schedule, accesses not watched.
MODES = [(schedule, race) for schedule in SCHEDULES for race in (False, True)][1:]


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_and_race_mode_give_the_same_answer(name: str) -> None:
    case = CASES[name]
    plain = emulated.run(case)
    # A developer's run has each case meet every other mode, and its neighbour the others.
    for schedule, race in some(MODES, *MODES[list(CASES).index(name) % 2 :: 2]):
        answer = emulated.run(case, schedule=schedule, seed=1, race=race)
        assert case.disagreements(plain, answer) == [], f"sequential against {schedule}, race={race}"


@pytest.mark.parametrize("name", CASES)
def test_every_case_writes_all_its_outputs(name: str) -> None:
    case = CASES[name]
    for output, after in emulated.run(case).items():
        assert not np.array_equal(after.view(np.uint8), case.outputs[output].view(np.uint8)), output


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("reduce_words/")])
def test_sums_of_64_bit_integers_are_those_of_numpy(name: str) -> None:
    case = CASES[name]
    expected = case.outputs["out"].copy()
    np.add.at(expected, case.inputs["elements"], case.inputs["x"])
    np.testing.assert_array_equal(emulated.run(case)["out"], expected)
