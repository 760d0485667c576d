from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.render.literals import float_literal, literal


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (0, "0"),
        (-7, "-7"),
        (2**31, "2147483648"),
        (2**64 - 1, "18446744073709551615ull"),
        (1.0, "0x1p+0f"),
        (0.0, "0x0p+0f"),
        (-0.0, "-0x0p+0f"),
        (0.1, "0x1.99999ap-4f"),
        (1e-45, "0x1p-149f"),
        ("half_t", "half_t"),
    ],
)
def test_values_become_cpp_literals(value: object, text: str) -> None:
    assert literal(value) == text


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float_literal_keeps_every_bit(value: float) -> None:
    text = float_literal(value)
    assert text.endswith("f")
    assert struct.pack("<f", float.fromhex(text[:-1])) == struct.pack("<f", value)


@pytest.mark.parametrize("value", [None, (1, 2), b"x", object(), 1j])
def test_values_without_a_cpp_spelling_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="no C\\+\\+ spelling"):
        literal(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e39, 2**64, -(2**63)])
def test_numbers_that_no_literal_holds_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"finite|fit"):
        literal(value)
