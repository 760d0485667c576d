"""8-bit floats in NumPy: what each code is worth, and which code a number is rounded to.

A number x is stored with the scale s as the code nearest to x / s, of two as near the even one. The quotient is
rounded to float32 first. Numbers beyond the largest are stored as that, NaN as NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.dtypes import CACHE_DTYPES, DType

Codes = NDArray[np.uint8]
#: Bits of the mantissa, and the exponent's bias.
_FORMATS = {"e4m3": (3, 7), "e5m2": (2, 15)}
_NAN = 0x7F


def values_of(dtype: str) -> NDArray[np.float64]:
    """The number that each of the 256 codes stands for."""
    mantissa_bits, bias = _FORMATS[dtype]
    magnitude = np.arange(128)
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    fraction = mantissa / 2.0**mantissa_bits + (exponent > 0)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    if dtype == "e4m3":
        values[_NAN] = np.nan
    else:
        values[0x7C], values[0x7D:] = np.inf, np.nan
    return np.concatenate([values, -values])


def quantized(dtype: str, x: Any, scale: Any = 1.0) -> Codes:
    """The codes of numbers x, which ``scale`` broadcasts to."""
    with np.errstate(all="ignore"):
        quotient = np.asarray(x).astype(np.float32) / np.asarray(scale, np.float32)
    values = values_of(dtype)[:128]
    finite = values[np.isfinite(values)]
    magnitude = np.minimum(np.abs(quotient.astype(np.float64)), finite[-1])
    below = np.searchsorted(finite, np.nan_to_num(magnitude), side="right") - 1
    above = np.minimum(below + 1, len(finite) - 1)
    # Codes are in the order of their numbers, and every second one is even.
    to_below, to_above = magnitude - finite[below], finite[above] - magnitude
    nearest = np.where((to_above < to_below) | ((to_above == to_below) & (below % 2 == 1)), above, below)
    codes = nearest | np.where(np.signbit(quotient), 0x80, 0)
    return np.where(np.isnan(quotient), _NAN, codes).astype(np.uint8)


def rounding_error(dtype: str, x: Any, scale: Any = 1.0) -> NDArray[np.float64]:
    """How far a stored number may be from x, if |x| is at most the largest number times the scale."""
    mantissa_bits, bias = _FORMATS[dtype]
    least = 2.0 ** (-bias - mantissa_bits)  # half of the smallest number
    # The quotient is rounded to float32 before.
    both = np.maximum(CACHE_DTYPES[dtype].epsilon * np.abs(np.asarray(x, np.float64)), least * np.asarray(scale))
    return np.asarray(both * (1 + 2.0**-20))


def cache_dtype_of(x: Any) -> DType | None:
    """The row of the dtype table for an array of 8-bit floats; None for any other array."""
    name = str(getattr(x, "dtype", "")).rpartition(".")[2]
    return next((d for d in CACHE_DTYPES.values() if name in d.aliases), None)


def codes_of(x: Any) -> Codes:
    """The codes in an array of 8-bit floats."""
    codes: Codes = np.asarray(x).view(np.uint8)
    return codes
