"""Scalar arithmetic: every special value, every 16-bit number, and the places where rounding turns."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from conformance.bounds import close_exp2, close_log2, close_reciprocal
from conformance.case import Agreement, Array, Case, same_bits, same_numbers
from conformance.inputs import unwritten, words

#: Zero, the least and the largest subnormal, the least normal, one and its neighbours, the largest, infinity.
_NUMBERS = [0, 1, 2, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000]
#: Quiet, canonical, signalling.
_NANS = [0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7FA5A5A5]
_SIGN = np.uint32(0x80000000)
_POSITIVE = np.array([*_NUMBERS, *_NANS], np.uint32)
SPECIAL = np.concatenate([_POSITIVE, _POSITIVE | _SIGN])


def _bits(x: Array) -> Array:
    return np.asarray(x, np.float32).view(np.uint32)


def _around(bits: Array) -> Array:
    """The numbers, and for each its two neighbours."""
    return np.concatenate([bits, bits + np.uint32(1), bits - np.uint32(1)])


def _case(label: str, variant: str, x: Array, y: Any = None, z: Any = None, agreement: Agreement = same_bits) -> Case:
    nothing = np.zeros(1, np.uint32)
    inputs = {
        name: np.broadcast_to(nothing if v is None else v, x.shape).copy() for name, v in (("x", x), ("y", y), ("z", z))
    }
    return Case(
        "math",
        label,
        f"Variant::{variant}",
        inputs={"count": x.size, **inputs},
        outputs={"out": unwritten(x.shape)},
        threads=256,
        agreement=functools.partial(_as_floats, agreement) if agreement is not same_bits else same_bits,
    )


def _as_floats(agreement: Agreement, case: Case, name: str, gpu: Array, emulated: Array) -> str | None:
    return agreement(case, name, gpu.view(np.float32), emulated.view(np.float32))


def _pairs(values: Array) -> tuple[Array, Array]:
    a, b = np.meshgrid(values, values)
    return a.ravel().copy(), b.ravel().copy()


def _triples(values: Array) -> tuple[Array, ...]:
    return tuple(x.ravel().copy() for x in np.meshgrid(values, values, values))


def _sixteen_bit_edges(widen: Any) -> Array:
    """Of every 16-bit number its value, the middle to the next one, and the neighbours of both, as floats."""
    bits = np.arange(2**15, dtype=np.uint32)
    value = widen(bits[:-1])
    with np.errstate(all="ignore"):
        middle = value + (widen(bits[1:]) - value) / 2
    edges = np.stack([_bits(value), _bits(middle), _bits(middle) - np.uint32(1), _bits(middle) + np.uint32(1)], 1)
    return edges.ravel()


def _half(bits: Array) -> Array:
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def _bfloat(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _exp2_inputs() -> Array:
    line = _bits(np.linspace(-152, 130, 4096))
    whole = _around(_bits(np.arange(-152, 130)))
    edge = _bits(np.float32([-126, -149, -150, 128])) + np.arange(-40, 41, dtype=np.int32)[:, None].astype(np.uint32)
    return np.concatenate([SPECIAL, line, whole, edge.ravel(), words(512, seed=4)])


def _log2_inputs() -> Array:
    powers = _around(np.arange(0, 255, dtype=np.uint32) << np.uint32(23))
    spread = (np.arange(2048, dtype=np.uint64) * 0x7F800000 // 2048).astype(np.uint32) | np.uint32(0x2A5)
    near_one = _bits(1 + np.linspace(-0.5, 1, 2048))
    close_to_one = np.uint32(0x3F800000) + np.arange(-200, 201, dtype=np.int32).astype(np.uint32)
    subnormal = np.uint32(1) << np.arange(23, dtype=np.uint32)
    return np.concatenate([SPECIAL, powers, spread, near_one, close_to_one, _around(subnormal), words(256, seed=5)])


def _reciprocal_inputs() -> Array:
    powers = _around(np.arange(0, 255, dtype=np.uint32) << np.uint32(23))
    one_binade = _bits(np.linspace(1, 2, 2048))
    positive = np.concatenate([powers, one_binade])
    return np.concatenate([SPECIAL, positive, positive | _SIGN, words(512, seed=15)])


def _fma_inputs() -> tuple[Array, Array, Array]:
    # Products that cancel all but the last bits of the sum, and results around the subnormal range.
    x, y = words(1024, seed=6) & np.uint32(0x80FFFFFF) | np.uint32(0x3F000000), words(1024, seed=7)
    y = y & np.uint32(0x80FFFFFF) | np.uint32(0x3F000000)
    z = _bits(-(x.view(np.float32) * y.view(np.float32)))
    tiny = (words(512, seed=8) & np.uint32(0x80FFFFFF), words(512, seed=9) & np.uint32(0xBFFFFFFF), words(512, seed=10))
    tiny = (tiny[0], tiny[1], tiny[2] & np.uint32(0x80FFFFFF))
    return tuple(np.concatenate(parts) for parts in zip((x, y, z), tiny, strict=True))  # type: ignore[return-value]


def _special_fma_inputs() -> tuple[Array, ...]:
    chosen = SPECIAL[[0, 1, 4, 6, 8, 9, 10, 12, 14, 18, 20, 22, 23, 24]]
    return _triples(chosen)


def _clipped_inputs() -> tuple[Array, ...]:
    """Sums that are just below or above zero and one, or are so before they are rounded, and any between."""
    near = _around(_bits([0.25, 0.5, 0.75, 1.0]))
    sums = _triples(np.concatenate([near, near | _SIGN]))
    spread = tuple(words(1024, seed=seed) & np.uint32(0x3FFFFFFF) for seed in (20, 21, 22))
    return tuple(np.concatenate(parts) for parts in zip(sums, spread, strict=True))


def _packed_case(label: str, x: Array, y: Array, variant: str = "kMultiplyBfloat16") -> Case:
    """A word holds a pair of numbers and, above it, the pair at the other end: lanes that are mixed up are seen."""
    x, y = (bits.astype(np.uint32) | bits[::-1].astype(np.uint32) << np.uint32(16) for bits in (x, y))
    return Case(
        "packed",
        label,
        f"Variant::{variant}",
        inputs={"count": x.size, "x": x, "y": y},
        outputs={"out": unwritten(x.shape)},
        threads=256,
    )


def _significands(exponents: tuple[int, int]) -> tuple[Array, Array]:
    """Every pair of significands, at these exponents; the products have either sign."""
    x, y = _pairs(np.arange(128, dtype=np.uint32))
    sign = (x + y) % np.uint32(2) << np.uint32(15)
    return x | np.uint32(127 + exponents[0] << 7), y | np.uint32(127 + exponents[1] << 7) | sign


def _products_at_edges() -> tuple[Array, Array]:
    """From just above the least normal number to half the least subnormal one, and around the largest."""
    ends = [(-63, small) for small in range(-72, -62)] + [(63, 64)]
    parts = [_significands(exponents) for exponents in ends]
    return tuple(np.concatenate(side)[::13] for side in zip(*parts, strict=True))  # type: ignore[return-value]


#: As above, and powers of two that make a subnormal number normal, or as small as that.
_BF16_NUMBERS = [0, 1, 2, 0x7F, 0x80, 0x81, 0x100, 0x3F00, 0x3F7F, 0x3F80, 0x3F81, 0x4300, 0x7F00, 0x7F7F, 0x7F80]
_POSITIVE_BF16 = np.array([*_BF16_NUMBERS, 0x7FC0, 0x7FFF, 0x7F81, 0x7FA5], np.uint32)
SPECIAL_BF16 = np.concatenate([_POSITIVE_BF16, _POSITIVE_BF16 | np.uint32(0x8000)])

_BF16_EDGES = np.concatenate([SPECIAL, _sixteen_bit_edges(_bfloat)[::7], words(2048, seed=11)])
_HALF_EDGES = np.concatenate([SPECIAL, _around(_bits([65504, 65520, 65536])), _sixteen_bit_edges(_half)])

#: Around the ends of whole numbers of 16 bits, and around zero.
_WHOLE_EDGES = np.array([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint32)

CASES = (
    _case("exp2", "kExp2", _exp2_inputs(), agreement=close_exp2),
    _case("log2", "kLog2", _log2_inputs(), agreement=close_log2),
    _case("reciprocal", "kReciprocal", _reciprocal_inputs(), agreement=close_reciprocal),
    _case("maximum-special", "kMaximum", *_pairs(SPECIAL), agreement=same_numbers),
    _case("maximum", "kMaximum", words(1024, seed=12), words(1024, seed=13), agreement=same_numbers),
    _case("maximum-magnitude-special", "kMaximumMagnitude", *_pairs(SPECIAL), agreement=same_numbers),
    _case("maximum-magnitude", "kMaximumMagnitude", words(1024, seed=18), words(1024, seed=19), agreement=same_numbers),
    _case("fma-special", "kFusedMultiplyAdd", *_special_fma_inputs(), agreement=same_numbers),
    _case("fma", "kFusedMultiplyAdd", *_fma_inputs(), agreement=same_numbers),
    _case("fma-clipped-special", "kFusedMultiplyAddClipped", *_special_fma_inputs(), agreement=same_numbers),
    _case("fma-clipped", "kFusedMultiplyAddClipped", *_fma_inputs(), agreement=same_numbers),
    _case("fma-clipped-edges", "kFusedMultiplyAddClipped", *_clipped_inputs(), agreement=same_numbers),
    _case("pack-bfloat16", "kPackBfloat16", _BF16_EDGES, np.roll(_BF16_EDGES, 1) ^ _SIGN),
    _case("to-half", "kToHalf", _HALF_EDGES),
    _case("to-half-negative", "kToHalf", _HALF_EDGES[::5] | _SIGN),
    _case("to-half-any", "kToHalf", words(1024, seed=14)),
    _case("half-to-float", "kHalfToFloat", np.arange(2**16, dtype=np.uint32), agreement=same_numbers),
    _packed_case("multiply-special", *_pairs(SPECIAL_BF16)),
    _packed_case("multiply", *_significands((0, 0))),
    _packed_case("multiply-edges", *_products_at_edges()),
    _packed_case("multiply-any", words(1024, seed=16) >> np.uint32(16), words(1024, seed=17) >> np.uint32(16)),
    _packed_case("minimum-packed-edges", *_pairs(_WHOLE_EDGES), "kMinimum"),
    _packed_case("minimum-packed", *(words(1024, seed=s) >> np.uint32(16) for s in (40, 41)), "kMinimum"),
)
