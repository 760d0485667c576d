"""Every kernel compiles for the architecture that the answers are recorded on."""

from __future__ import annotations

import hashlib

import pytest
from conformance.cases import CASES
from conformance.units import Unit, compile_unit, units_of

from flashgen.compile import compiler_build_id

UNITS = units_of(CASES.values())


@pytest.mark.parametrize("unit", UNITS, ids=[f"{u.kernel}-{i}" for i, u in enumerate(UNITS)])
def test_every_kernel_compiles(unit: Unit, request: pytest.FixtureRequest) -> None:
    # What has compiled once will again; pytest's cache remembers which texts have.
    key = "device/" + hashlib.sha256(f"{compiler_build_id()}\n{unit.text}".encode()).hexdigest()
    cache = getattr(request.config, "cache", None)
    if cache is not None and cache.get(key, False):
        return
    assert compile_unit(unit).startswith(b"\x7fELF")
    if cache is not None:
        cache.set(key, True)
