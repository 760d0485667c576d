"""CuPy arrays: allocated by CuPy, launched on CuPy's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashgen.dtypes import RESULTS
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo, dtype_name, elements, low_bits


class CupyArrays:
    """Adapter for cupy.ndarray."""

    name = "CuPy"

    def signature(self, arrays: tuple[Any, ...], requested: Any) -> tuple[Any, tuple[int, ...]]:
        """Types, shapes, strides, dtypes, devices and low address bits; and the addresses."""
        pointers = tuple(a.data.ptr for a in arrays)
        return tuple(
            (type(a), a.shape, a.strides, a.dtype, a.device.id, low_bits(pointer))
            for a, pointer in zip(arrays, pointers, strict=True)
        ), pointers

    def describe(self, names: Sequence[str], signature: Any) -> list[ArrayInfo]:
        """The arrays of a signature."""
        return [_info(name, *traits) for name, traits in zip(names, signature, strict=True)]

    def layout(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Shape and element type."""
        return shape, RESULTS[dtype].numpy()

    def allocate(self, like: Any, layouts: Sequence[Any], stream: int) -> tuple[list[Any], list[int]]:
        """From CuPy's memory pool."""
        import cupy

        with like.device:
            made = [cupy.empty(shape, dtype=dtype) for shape, dtype in layouts]
        return made, [int(array.data.ptr) for array in made]

    def stream(self, device: int, requested: Any) -> int:
        """CuPy's current stream of the device."""
        import cupy

        if requested is not None:
            raise ArgumentError("stream= is not for CuPy arrays; wrap the call in 'with stream:'")
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)


def _info(
    name: str, kind: type, shape: tuple[int, ...], byte_strides: tuple[int, ...], dtype: Any, device: int, bits: int
) -> ArrayInfo:
    if not dtype.isnative:
        raise ArgumentError(f"{name} has byte order {dtype.byteorder!r}; convert it to the native one")
    strides = elements(name, tuple(byte_strides), dtype.itemsize)
    return ArrayInfo(name, bits, tuple(shape), strides, dtype_name(dtype.name), device)
