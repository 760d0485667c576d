"""Every kernel compiles for the architecture that the answers are recorded on."""

from __future__ import annotations

import hashlib

import pytest
from conformance.cases import CASES
from conformance.units import compile_unit, units_of

from flashgen.compile import compiler_build_id
from tests.drawn import some

pytestmark = pytest.mark.in_turns(12)

UNITS = units_of(CASES.values())


NUMBERED = {f"{unit.kernel}-{number}": unit for number, unit in enumerate(UNITS)}


@pytest.mark.parametrize("name", some(NUMBERED, *list(NUMBERED)[::4]))
def test_every_kernel_compiles(name: str, request: pytest.FixtureRequest) -> None:
    unit = NUMBERED[name]
    # What has compiled once will again; pytest's cache remembers which texts have.
    key = "device/" + hashlib.sha256(f"{compiler_build_id()}\n{unit.text}".encode()).hexdigest()
    cache = getattr(request.config, "cache", None)
    if cache is not None and cache.get(key, False):
        return
    assert compile_unit(unit).startswith(b"\x7fELF")
    if cache is not None:
        cache.set(key, True)
