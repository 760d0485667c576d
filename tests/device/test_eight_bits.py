"""What kernels make of 8-bit floats is what the oracle says, for each of the 256 codes and for any float."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import emulated
from conformance.cases import CASES

from flashgen import oracle


@pytest.mark.parametrize(
    ("case", "dtype"), [("e4m3-by-instruction", "e4m3"), ("e4m3-by-bits", "e4m3"), ("e5m2", "e5m2")]
)
def test_every_code_becomes_the_16_bit_float_of_the_same_value(case: str, dtype: str) -> None:
    own = CASES[f"eight_bits/{case}"]
    codes = own.inputs["x"].view(np.uint8)
    expected = oracle.values_of(dtype)[codes].astype(np.float16)
    found = emulated.run(own)["out"]
    assert set(codes) == set(range(256))
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))


def test_four_floats_are_packed_as_the_oracle_rounds_them() -> None:
    own = CASES["eight_bits/pack-e4m3"]
    x = own.inputs["x"].view(np.float32)
    with np.errstate(all="ignore"):
        places = [
            oracle.quantized("e4m3", y).astype(np.uint32) for y in (x, -x, np.float32(0.5) * x, x * np.float32(2))
        ]
    expected = sum(codes << np.uint32(8 * i) for i, codes in enumerate(places))
    found = emulated.run(own)["out"]
    # NaN has either sign: the instruction gives 0x7f.
    np.testing.assert_array_equal(found[~np.isnan(x)], expected[~np.isnan(x)])
    assert (found[np.isnan(x)] == 0x7F7F7F7F).all()


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_floats_are_rounded_as_the_oracle_rounds_them(dtype: str) -> None:
    own = CASES[f"eight_bits/to-{dtype}"]
    with np.errstate(invalid="ignore"):
        expected = oracle.quantized(dtype, own.inputs["x"].view(np.float32))
    np.testing.assert_array_equal(emulated.run(own)["out"], expected)
