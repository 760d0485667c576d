"""Python values as C++ literals: the last word on everything a template prints."""

from __future__ import annotations

import math
import struct


def literal(value: object) -> str:
    """``value`` as C++ reads it: true/false, whole numbers, hexadecimal floats; text stays as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return float_literal(value)
    raise TypeError(f"{value!r} ({type(value).__name__}) has no C++ spelling; print a bool, an int, a float or text")


def float_literal(value: float) -> str:
    """A C++ float constant with exactly the bits of ``value`` rounded to 32 bits."""
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number; name it in a header instead")
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        raise ValueError(f"{value!r} does not fit a 32-bit float") from None
    mantissa, exponent = rounded.hex().split("p")
    # float.hex() writes all 13 digits of a double; the zeros at the end say nothing.
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}f" if "." in mantissa else f"{mantissa}p{exponent}f"


def _integer(value: int) -> str:
    if not -(2**63) < value < 2**64:
        raise ValueError(f"{value} does not fit 64 bits")
    # C++ takes a plain number as int or long long, whichever fits; above that it needs to be told.
    return f"{value}ull" if value >= 2**63 else str(value)
