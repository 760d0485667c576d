"""ldmatrix and mma.sync."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from conformance.case import Agreement, Array, Case, same_bits, same_numbers
from conformance.inputs import integers, unwritten, words

_ELEMENTS: dict[str, Any] = {
    "kHalf16": np.float16,
    "kBfloat16": ml_dtypes.bfloat16,
    "kHalf8": np.float16,
    "kE4m3": ml_dtypes.float8_e4m3fn,
    "kE5m2": ml_dtypes.float8_e5m2,
    "kBatchedHalf16": np.float16,
    "kBatchedBfloat16": ml_dtypes.bfloat16,
    "kBatchedHalf8": np.float16,
    "kBatchedE4m3": ml_dtypes.float8_e4m3fn,
}
#: Bits of infinity and of NaN; e4m3 has no infinity.
_NO_NUMBERS: dict[Any, tuple[int, int]] = {
    np.float16: (0x7C00, 0x7E00),
    ml_dtypes.bfloat16: (0x7F80, 0x7FC0),
    ml_dtypes.float8_e4m3fn: (0x7F, 0x7F),
    ml_dtypes.float8_e5m2: (0x7C, 0x7E),
}
_STEPS = 3
_SHUFFLED = np.argsort(words(64, seed=36))[:32]
_ROW_ORDERS = {"in-order": np.arange(32), "shuffled": _SHUFFLED}


def _ldmatrix(matrices: int, transposed: bool, order: str, rows: Array) -> Case:
    return Case(
        "ldmatrix",
        f"x{matrices}{'-transposed' * transposed}-{order}",
        f"{{{matrices}, {str(transposed).lower()}}}",
        inputs={"count": 64, "x": words((64, 4), seed=30), "rows": rows.astype(np.int32)},
        outputs={"out": unwritten((32, 4))},
        smem_bytes=1024,
    )


def _stmatrix(matrices: int, transposed: bool, order: str, rows: Array) -> Case:
    return Case(
        "stmatrix",
        f"x{matrices}{'-transposed' * transposed}-{order}",
        f"{{{matrices}, {str(transposed).lower()}}}",
        inputs={"count": 64, "x": words((32, 4), seed=39), "rows": rows.astype(np.int32)},
        outputs={"out": unwritten((64, 4))},
        smem_bytes=1024,
    )


def _mma(
    variant: str,
    label: str,
    a: Array,
    b: Array,
    agreement: Agreement = same_bits,
    c: Array | None = None,
) -> Case:
    registers = [_encoded(x, _ELEMENTS[variant]) for x in (a, b)]
    if c is None:
        c = integers((32, 4), -100, 100, seed=33).astype(np.float32)
    return Case(
        "mma",
        f"{variant[1:].lower()}-{label}",
        f"Variant::{variant}",
        inputs={"steps": _STEPS, "a": registers[0], "b": registers[1], "c": c},
        outputs={"d": unwritten((32, 4), np.float32)},
        agreement=agreement,
    )


def _encoded(x: Array, element: Any) -> Array:
    """Elements in registers. Infinity and NaN are written by their bits, which a conversion is free to choose."""
    infinity, nan = _NO_NUMBERS[element]
    finite = np.where(np.isfinite(x), x, 0).astype(element)
    bits = finite.view(f"u{finite.itemsize}")
    sign = np.where(np.signbit(x), 1 << (8 * finite.itemsize - 1), 0)
    special = np.where(np.isnan(x), nan, infinity) | sign
    return np.ascontiguousarray(np.where(np.isfinite(x), bits, special).astype(bits.dtype)).view(np.uint32)


def _special(x: Array, seed: int) -> Array:
    """``x`` with here and there an infinity, a NaN or a zero that may meet one of them."""
    values = np.array([np.inf, -np.inf, np.nan, 0.0])
    where = integers(x.shape, 0, 400, seed=seed)
    return np.where(where < values.size, values[np.minimum(where, values.size - 1)], x)


def _mma_cases(variant: str) -> list[Case]:
    element = _ELEMENTS[variant]
    per_register = 4 // np.dtype(element).itemsize
    # Such that sums are exact even where the hardware keeps few bits of them.
    limit = 32 if per_register == 2 else 4
    a = integers((_STEPS, 32, 4 * per_register), -limit, limit, seed=31).astype(np.float64)
    b = integers((_STEPS, 32, 2 * per_register), -limit, limit, seed=32).astype(np.float64)
    smallest = float(ml_dtypes.finfo(element).smallest_subnormal)
    # A power of two such that products of subnormal numbers by it are normal, and exact.
    scale = 2.0 ** min(12, np.floor(np.log2(float(ml_dtypes.finfo(element).max) / limit)))
    special = _special(a, 34), _special(b, 35)
    zero = np.zeros((32, 4), np.float32)
    cases = [_mma(variant, "integers", a, b)]
    if not variant.startswith("kBatched"):
        cases += [
            _mma(variant, "subnormal-operands", a * smallest, b * scale, c=zero),
            _mma(variant, "special-values", *special, same_numbers),
        ]
    return cases


CASES = (
    *(
        make(matrices, transposed, order, rows)
        for make in (_ldmatrix, _stmatrix)
        for matrices in (1, 2, 4)
        for transposed in (False, True)
        for order, rows in _ROW_ORDERS.items()
    ),
    _ldmatrix(4, False, "one-row", np.full(32, 9)),
    *(case for variant in _ELEMENTS for case in _mma_cases(variant)),
    _mma(
        "kBfloat16",
        "subnormal-products",
        integers((_STEPS, 32, 8), -32, 32, seed=37) * 2.0**-75,
        integers((_STEPS, 32, 4), -32, 32, seed=38) * 2.0**-70,
        c=np.zeros((32, 4), np.float32),
    ),
    # Sums beyond the largest number are infinity.
    _mma(
        "kBfloat16",
        "overflow",
        np.where(integers((_STEPS, 32, 8), 0, 8, seed=42) == 0, 2.0**127, 0.0),
        np.where(integers((_STEPS, 32, 4), 0, 8, seed=43) == 0, 2.0, 0.0),
    ),
)
