"""Floats as C++ constants."""

from __future__ import annotations

import math
import struct


def float_literal(value: float) -> str:
    """A C++ float constant with exactly the bits of ``value`` rounded to 32 bits."""
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number; name it in a header instead")
    rounded = rounded_to_float(value)
    if math.isinf(rounded):
        raise ValueError(f"{value!r} does not fit a 32-bit float")
    mantissa, exponent = rounded.hex().split("p")
    # float.hex() writes all 13 digits of a double; the zeros at the end say nothing.
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}f" if "." in mantissa else f"{mantissa}p{exponent}f"


def rounded_to_float(value: float) -> float:
    """The nearest 32-bit float; infinity for what is too large."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
