"""NumPy arrays, for the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from flashgen.dtypes import RESULTS
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import HOST, ArrayInfo, dtype_name, elements, low_bits

#: Arrays that hold plain elements; what else a subclass means (a mask, a unit), kernels do not know.
_PLAIN = (numpy.ndarray, numpy.memmap)


class NumpyArrays:
    """Adapter for numpy.ndarray."""

    name = "NumPy"

    def signature(self, arrays: tuple[Any, ...], requested: Any) -> tuple[Any, tuple[int, ...]]:
        """Types, shapes, strides, dtypes with their byte order, flags and low address bits; and the addresses."""
        pointers = tuple(_pointer(a) for a in arrays)
        return tuple(
            (type(a), a.shape, a.strides, a.dtype, a.flags.writeable, low_bits(pointer))
            for a, pointer in zip(arrays, pointers, strict=True)
        ), pointers

    def describe(self, names: Sequence[str], signature: Any) -> list[ArrayInfo]:
        """The arrays of a signature."""
        return [_info(name, *traits) for name, traits in zip(names, signature, strict=True)]

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


def _info(
    name: str, kind: type, shape: tuple[int, ...], byte_strides: tuple[int, ...], dtype: Any, writable: bool, bits: int
) -> ArrayInfo:
    if kind not in _PLAIN:
        remedy = "fill it first" if issubclass(kind, numpy.ma.MaskedArray) else "pass numpy.asarray of it"
        raise ArgumentError(
            f"{name} is a {kind.__qualname__}, of which kernels would read the elements alone; {remedy}"
        )
    if not dtype.isnative:
        raise ArgumentError(f"{name} has byte order {dtype.byteorder!r}; convert it to the native one")
    strides = elements(name, byte_strides, dtype.itemsize)
    return ArrayInfo(name, bits, shape, strides, dtype_name(dtype.name), HOST, writable)


def _pointer(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
