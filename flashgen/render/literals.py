"""Python values as C++ literals: the last word on everything a template prints."""

from __future__ import annotations

from flashgen.common.literal import float_literal


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


def _integer(value: int) -> str:
    if not -(2**63) < value < 2**64:
        raise ValueError(f"{value} does not fit 64 bits")
    # C++ takes a plain number as int or long long, whichever fits; above that it needs a suffix.
    return f"{value}ull" if value >= 2**63 else str(value)
