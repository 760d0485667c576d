"""CuPy arrays: allocated by CuPy, launched on CuPy's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashgen.dtypes import RESULTS
from flashgen.errors import ArgumentError
from flashgen.launch.array import ArrayInfo, dtype_name, elements, low_bits


class CupyArrays:
    """Adapter for cupy.ndarray."""

    name = "CuPy"

    def signature(self, arrays: tuple[Any, ...], requested: Any) -> tuple[Any, tuple[int, ...]]:
        """Shapes, strides, dtypes, devices and low address bits; and the addresses."""
        pointers = tuple(a.data.ptr for a in arrays)
        return (*((a.shape, a.strides, a.dtype, a.device.id) for a in arrays), low_bits(pointers)), pointers

    def describe(self, name: str, array: Any) -> ArrayInfo:
        """Everything about one array."""
        strides = elements(name, tuple(array.strides), array.dtype.itemsize)
        dtype = dtype_name(array.dtype.name)
        return ArrayInfo(name, array.data.ptr, tuple(array.shape), strides, dtype, array.device.id)

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
