"""Numbers that look random and are the same on every machine and with every NumPy."""

from __future__ import annotations

import numpy as np

from conformance.case import Array


def noise(count: int, seed: int) -> Array:
    """64 mixed bits per element (the SplitMix64 generator)."""
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def integers(shape: int | tuple[int, ...], low: int, high: int, seed: int = 0) -> Array:
    """Integers from ``low`` to ``high``, both included."""
    count = int(np.prod(shape))
    return (noise(count, seed) % np.uint64(high - low + 1)).astype(np.int64).reshape(shape) + low


def words(shape: int | tuple[int, ...], seed: int = 0) -> Array:
    """32 arbitrary bits per element."""
    return (noise(int(np.prod(shape)), seed) >> np.uint64(32)).astype(np.uint32).reshape(shape)


def nonzero_bytes(count: int, seed: int = 0) -> Array:
    """Bytes from 1 to 255: a zero in a result was not read from here."""
    return integers(count, 1, 255, seed).astype(np.uint8)


def unwritten(shape: int | tuple[int, ...], dtype: type | str = np.uint32) -> Array:
    """An output of bytes 0xE7: what a kernel leaves alone is seen."""
    array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = 0xE7
    return array
