"""Every case on a GPU: the same answers as when they were recorded."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.cases import CASES, FAMILIES
from conformance.records import recorded
from conformance.units import compile_unit, units_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Any:
    from conformance.gpu import Gpu

    gpu = Gpu()
    if gpu.capability != 90:
        pytest.skip(f"the answers were recorded on compute capability 9.0; this GPU has {gpu.capability / 10}")
    return gpu


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_answers_as_recorded(gpu: Any, family: str) -> None:
    entries = recorded(family)
    assert entries, "nothing is recorded"
    images = {unit: compile_unit(unit) for unit in units_of(FAMILIES[family])}
    found = []
    for name, entry in entries.items():
        case = CASES[name]
        unit = next(u for u in images if u.kernel == case.kernel and case.variant in u.variants)
        answer = gpu.run(case, unit, images[unit])
        found += [f"{name}: {what}" for what in case.disagreements(entry.outputs, answer)]
    assert found == []
