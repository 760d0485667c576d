"""16-bit queries, keys and values as e4m3: rotated, then divided by a scale for each block of rows, and rounded.

Neighboring rows of a head share a scale: the first ``block``, the next, and so on. In float32, step by step:

1. With ``rotate``, queries and keys are rotated: columns change signs as ``rotation_signs`` says, and every group of
   ``group_of(head_dim)`` columns takes the Hadamard transform, without its factor 1 / sqrt(group). Butterflies combine
   columns 1 apart, then 2, 4 ... Values are not rotated.
2. ``largest`` is the largest finite magnitude of the block, or 2^-100 if that is more.
3. Each element times (448 / largest) is rounded to the nearest e4m3, of two as near the even one. NaN and infinity
   become NaN.
4. The scale is largest * (1 / sqrt(group)) / 448. An element is about its code times the scale.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.oracle.eight_bits import Codes, quantized, values_of

Floats = NDArray[np.float32]
#: The largest number of e4m3, and the least that a block's largest magnitude counts as.
_LARGEST, _LEAST = np.float32(448), np.float32(2.0**-100)


def group_of(head_dim: int) -> int:
    """How many columns are rotated together: the largest power of two that divides a head."""
    return head_dim & -head_dim


def rotation_signs(head_dim: int) -> NDArray[np.float64]:
    """1 or -1 for each column, the same for all rows."""
    chunks = -(-head_dim // 8)
    bits = [(0x9E3779B1 * (chunk + 1) & 0xFFFFFFFF) >> 24 >> i & 1 for chunk in range(chunks) for i in range(8)]
    return 1.0 - 2.0 * np.array(bits[:head_dim])


def rotation(head_dim: int) -> NDArray[np.float64]:
    """The orthogonal matrix R of the rotation: a row x becomes x R."""
    group = group_of(head_dim)
    hadamard = np.ones((1, 1))
    while len(hadamard) < group:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    blocks = np.kron(np.eye(head_dim // group), hadamard / math.sqrt(group))
    return np.asarray(rotation_signs(head_dim)[:, None] * blocks)


def quantized_rows(x: Any, block: int, *, rotate: bool) -> tuple[Codes, Floats]:
    """The codes of x (batch, rows, heads, head_dim), and its scales (batch, heads, blocks)."""
    batch, rows, heads, dim = x.shape
    blocks = -(-rows // block)
    y = np.zeros((batch, blocks * block, heads, dim), np.float32)
    y[:, :rows] = x
    y, factor = _rotated(y) if rotate else (y, np.float32(1))
    y = y.reshape(batch, blocks, block, heads, dim)
    magnitudes = np.where(np.isfinite(y), np.abs(y), np.float32(0))
    largest = np.maximum(magnitudes.max((2, 4), initial=0), _LEAST)
    with np.errstate(all="ignore"):
        scaled = y * (_LARGEST / largest)[:, :, None, :, None]
        codes = quantized("e4m3", np.where(np.isfinite(scaled), scaled, np.float32(np.nan)))
    codes = codes.reshape(batch, blocks * block, heads, dim)[:, :rows]
    return codes, np.ascontiguousarray((largest * factor / _LARGEST).transpose(0, 2, 1))


def quantized_packed_rows(x: Any, starts: Any, block: int, *, rotate: bool, used: Any = None) -> tuple[Codes, Floats]:
    """The same of packed sequences: x is (total, heads, head_dim), and scales are (heads, total // block + sequences).

    Block j of sequence i is number ``starts[i] // block + i + j``. Rows that belong to no sequence, or are not used,
    have the code of NaN, and so do scales without a block.
    """
    total, heads, _ = x.shape
    codes = np.full(x.shape, 0x7F, np.uint8)
    scales = np.full((heads, total // block + len(starts) - 1), np.nan, np.float32)
    for i, first in enumerate(map(int, starts[:-1])):
        count = int(starts[i + 1]) - first if used is None else int(used[i])
        made, its_scales = quantized_rows(x[None, first : first + count], block, rotate=rotate)
        codes[first : first + count] = made[0]
        number = first // block + i
        scales[:, number : number + its_scales.shape[2]] = its_scales[0]
    return codes, scales


def dequantized_rows(codes: Codes, scales: Floats, block: int) -> NDArray[np.float64]:
    """What codes (batch, rows, heads, head_dim) stand for: of queries and keys, the rotated rows."""
    return np.asarray(values_of("e4m3")[codes] * _of_rows(scales, block, codes.shape[1]))


def quantization_error(x: Any, scales: Floats, block: int, *, rotate: bool) -> NDArray[np.float64]:
    """How far ``dequantized_rows`` may be from x (batch, rows, heads, head_dim), which ``rotate`` multiplies by R.

    Half a step of e4m3, or half of its smallest number, and what float32 rounds on the way.
    """
    rows = np.asarray(x).astype(np.float64)
    exact = rows @ rotation(rows.shape[-1]) if rotate else rows
    norm = np.sqrt(np.sum(rows**2, -1, keepdims=True))
    half_steps = np.maximum(2.0**-4 * np.abs(exact), 2.0**-10 * _of_rows(scales, block, rows.shape[1]))
    return np.asarray(half_steps * (1 + 2.0**-18) + 2.0**-20 * norm)


def _of_rows(scales: Floats, block: int, rows: int) -> NDArray[np.float64]:
    """The scale of each row (batch, rows, heads, 1)."""
    repeated = np.repeat(scales.astype(np.float64), block, axis=2)[:, :, :rows]
    of_rows: NDArray[np.float64] = repeated.transpose(0, 2, 1)[..., None]
    return of_rows


def _rotated(x: Floats) -> tuple[Floats, np.float32]:
    """The rotated rows, too large by the square root of a group, and the factor that they lack."""
    dim = x.shape[-1]
    group = group_of(dim)
    y = x * rotation_signs(dim).astype(np.float32)
    apart = 1
    with np.errstate(all="ignore"):
        while apart < group:
            pairs = y.reshape(*x.shape[:-1], dim // (2 * apart), 2, apart)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            y = np.stack([first + second, first - second], -2).reshape(x.shape)
            apart *= 2
    return y, np.float32(1 / math.sqrt(group))
