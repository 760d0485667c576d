"""The bounds of the approximate instructions let their errors pass and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import emulated
from conformance.case import Array
from conformance.cases import CASES

#: The approximations, and by how many units a result may be moved.
ROOM = {"math/exp2": 1, "math/log2": 1, "math/reciprocal": 0}


def judge(name: str, change: Array | int, where: Array | slice = slice(None)) -> bool:
    """Whether an answer passes as the GPU's when ``change`` is added to some of its results' bits."""
    case = CASES[name]
    emulated_answer = emulated.run(case)
    gpu = {"out": emulated_answer["out"].copy()}
    gpu["out"][where] += np.uint32(change)
    return case.disagreements(gpu, emulated_answer) == []


def ordinary(name: str) -> Array:
    """Where results are finite and neither zero nor next to a power of two, where units change."""
    out = emulated.run(CASES[name])["out"]
    mantissa = out & np.uint32(0x7FFFFF)
    numbers = np.isfinite(out.view(np.float32)) & (out.view(np.float32) != 0)
    return numbers & (mantissa > 8) & (mantissa < 0x7FFFF0)


@pytest.mark.parametrize("name", ROOM)
def test_results_of_the_emulator_are_within_the_bound_with_some_room(name: str) -> None:
    assert judge(name, 0)
    assert judge(name, ROOM[name], ordinary(name))


@pytest.mark.parametrize("name", ROOM)
def test_three_units_are_too_many(name: str) -> None:
    assert not judge(name, 3, np.flatnonzero(ordinary(name))[:1])


@pytest.mark.parametrize("name", ROOM)
def test_a_number_is_no_infinity_and_no_nan(name: str) -> None:
    case = CASES[name]
    answer = emulated.run(case)
    place = np.flatnonzero(ordinary(name))[0]
    for value in (np.inf, -np.inf, np.nan):
        gpu = {"out": answer["out"].copy()}
        gpu["out"].view(np.float32)[place] = value
        assert case.disagreements(gpu, answer)


def test_results_of_exp2_below_the_normal_range_are_zero() -> None:
    case = CASES["math/exp2"]
    answer = emulated.run(case)
    place = np.flatnonzero(case.inputs["x"].view(np.float32) == -140)[0]
    gpu = {"out": answer["out"].copy()}
    gpu["out"].view(np.float32)[place] = 2.0**-140
    assert case.disagreements(gpu, answer)
