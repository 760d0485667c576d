"""Values as error messages quote them: short, and printable whatever they are."""

from __future__ import annotations

import reprlib

_LONGEST_INTEGER_BITS = 256


def show(value: object) -> str:
    """A short ``repr``; Python refuses to print integers of thousands of digits, so those are described."""
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER_BITS:
        return f"<an integer of {value.bit_length()} bits>"
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    short.maxdict = short.maxlist = short.maxtuple = 6
    try:
        return short.repr(value)
    except ValueError:  # such an integer is somewhere inside
        return f"<a {type(value).__name__}>"
