"""Products of bits, how many a row and a column have in common, and the bits of numbers that are not finite."""

from __future__ import annotations

import numpy as np

from conformance.case import Array, Case
from conformance.inputs import integers, unwritten, words

_STEPS = 3
_LEFT, _RIGHT = (_STEPS, 32, 2), (_STEPS, 32)
_MOST = 128 * _STEPS


def _product(label: str, a: Array, b: Array, c: Array) -> Case:
    return Case(
        "bits",
        label,
        "Variant::kCommonBits",
        inputs={"steps": _STEPS, "a": a, "b": b, "c": c.astype(np.int32)},
        outputs={"d": unwritten((32, 4), np.int32)},
    )


def _one_bit_each(shape: tuple[int, ...], seed: int) -> Array:
    """Words of one of four bits: few meet, and a wrong pair is seen."""
    return np.array([1, 2, 4, 8], np.uint32)[integers(shape, 0, 3, seed=seed)]


def _all_bits(shape: tuple[int, ...]) -> Array:
    return np.full(shape, 2**32 - 1, np.uint32)


def _not_finite(label: str, variant: str, low: Array, high: Array) -> Case:
    return Case(
        "not_finite_bits",
        label,
        f"Variant::{variant}",
        inputs={"count": low.size, "x": low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)},
        outputs={"out": unwritten(low.shape)},
        threads=256,
    )


def _special(infinity: int) -> Array:
    """Of either sign: zero, ends of the subnormal and the normal numbers, infinity, signalling and quiet NaNs."""
    normal = 0x8000 - infinity
    quiet = infinity + normal // 2
    numbers = [0, 1, normal - 1, normal, infinity - normal, infinity - 2, infinity - 1, infinity]
    positive = np.array([*numbers, infinity + 1, quiet - 1, quiet, quiet + 1, 0x7FFF])
    return np.concatenate([positive, positive | 0x8000])


def _pairs(values: Array) -> tuple[Array, Array]:
    a, b = np.meshgrid(values, values)
    return a.ravel(), b.ravel()


_EVERY = np.arange(2**16)

CASES = (
    _product("random", words(_LEFT, seed=65), words(_RIGHT, seed=66), integers((32, 4), -100, 100, seed=67)),
    _product("one-bit-each", _one_bit_each(_LEFT, 68), _one_bit_each(_RIGHT, 69), np.zeros((32, 4))),
    _product("all-bits", _all_bits(_LEFT), _all_bits(_RIGHT), integers((32, 4), -2 * _MOST, 0, seed=70)),
    # Sums that a float would round.
    _product(
        "large-starts",
        words(_LEFT, seed=71),
        words(_RIGHT, seed=72),
        integers((32, 4), -(2**31), 2**31 - 1 - _MOST, seed=73),
    ),
    # Each below and above others; in the order of their bits, for a small record.
    _not_finite("bfloat16", "kBfloat16", _EVERY, _EVERY[::-1]),
    _not_finite("bfloat16-special", "kBfloat16", *_pairs(_special(0x7F80))),
    _not_finite("half", "kHalf", _EVERY, _EVERY[::-1]),
    _not_finite("half-special", "kHalf", *_pairs(_special(0x7C00))),
)
