"""Bytes of words, and 8-bit floats to and from others."""

from __future__ import annotations

import numpy as np

from conformance.case import Array, Case, same_numbers
from conformance.inputs import unwritten, words

#: Each byte in each place of a word, beside others.
EVERY_BYTE = np.arange(256, dtype=np.uint32)
EVERY_BYTE = np.concatenate(
    [EVERY_BYTE << np.uint32(8 * place) | (EVERY_BYTE ^ 0x5A) << np.uint32(8 * ((place + 1) % 4)) for place in range(4)]
)
_EVERY_HALF = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
#: Floats that are rounded: all of 16 bits, and near each of these where their rounding changes.
FLOATS = np.concatenate(
    [_EVERY_HALF.view(np.uint32), _EVERY_HALF.view(np.uint32)[::7] + np.uint32(1), words(1024, seed=80)]
)
_SPECIAL = np.array([0, 1, 0x03FF, 0x0400, 0x3C00, 0x3C01, 0x5C00, 0x7BFF, 0x7C00, 0x7E00, 0xBC00, 0x8001, 0xFBFF])


def _case(label: str, variant: str, x: Array, y: Array | None = None, *, halves: int = 0) -> Case:
    """``halves``: how many 16-bit floats each word gives; without, results are words."""
    y = np.zeros_like(x) if y is None else y
    return Case(
        "eight_bits",
        label,
        f"Variant::{variant}",
        inputs={"count": x.size, "x": x, "y": y},
        outputs={"out": unwritten((x.size * (halves or 1),), np.float16 if halves else np.uint32)},
        threads=256,
        **({"agreement": same_numbers} if halves else {}),
    )


def _pairs() -> tuple[Array, Array]:
    a, b = (x.ravel().astype(np.uint32) for x in np.meshgrid(_SPECIAL, _SPECIAL))
    return a | a[::-1] << np.uint32(16), b | b[::-1] << np.uint32(16)


CASES = (
    _case("select-low", "kSelectLow", words(256, seed=81), words(256, seed=82)),
    _case("select-high", "kSelectHigh", words(256, seed=83), words(256, seed=84)),
    _case("multiply-half-special", "kMultiplyHalf", *_pairs(), halves=2),
    _case("multiply-half", "kMultiplyHalf", words(1024, seed=85), words(1024, seed=86), halves=2),
    _case("e4m3-by-instruction", "kE4m3ByInstruction", EVERY_BYTE, halves=4),
    _case("e4m3-by-bits", "kE4m3ByBits", EVERY_BYTE, halves=4),
    _case("e5m2", "kE5m2", EVERY_BYTE, halves=4),
    _case("to-e4m3", "kToE4m3", FLOATS),
    _case("to-e5m2", "kToE5m2", FLOATS),
    _case("pack-e4m3", "kPackE4m3", FLOATS),
)
