"""NumPy arrays, for the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from flashgen.dtypes import RESULTS
from flashgen.errors import ArgumentError
from flashgen.launch.array import HOST, ArrayInfo, dtype_name, elements, low_bits


class NumpyArrays:
    """Adapter for numpy.ndarray."""

    name = "NumPy"

    def signature(self, arrays: tuple[Any, ...], requested: Any) -> tuple[Any, tuple[int, ...]]:
        """Shapes, strides, dtypes and low address bits; and the addresses."""
        pointers = tuple(_pointer(a) for a in arrays)
        return (*((a.shape, a.strides, a.dtype.name) for a in arrays), low_bits(pointers)), pointers

    def describe(self, name: str, array: Any) -> ArrayInfo:
        """Everything about one array."""
        if not array.dtype.isnative:
            raise ArgumentError(f"{name} has byte order {array.dtype.byteorder!r}; convert it to the native one")
        strides = elements(name, array.strides, array.dtype.itemsize)
        return ArrayInfo(name, _pointer(array), array.shape, strides, dtype_name(array.dtype.name), HOST)

    def layout(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Shape and element type."""
        return shape, RESULTS[dtype].numpy()

    def allocate(self, like: Any, layouts: Sequence[Any], stream: int) -> tuple[list[Any], list[int]]:
        """Poisoned with NaN, so that what a kernel fails to write shows."""
        made: list[Any] = [numpy.full(shape, numpy.nan, dtype=dtype) for shape, dtype in layouts]
        return made, [_pointer(array) for array in made]

    def stream(self, device: int, requested: Any) -> int:
        """There are no streams on a CPU."""
        if requested is not None:
            raise ArgumentError("stream= has no meaning for NumPy arrays; leave it out")
        return 0


def _pointer(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
