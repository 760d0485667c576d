"""``DeviceArray``: what a call returns for arrays of a library that flashgen cannot allocate in."""

from __future__ import annotations

import weakref
from typing import Any

from flashgen.dtypes import ARGUMENTS
from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.arrays import dlpack
from flashgen.launch.arrays.array import ArrayInfo, contiguous_strides
from flashgen.launch.driver.cuda import CudaDriver

_TYPESTR = {"fp16": "<f2", "fp32": "<f4"}
_PLAIN_STREAMS = (0, 1, 2)


class DeviceArray:
    """Contiguous GPU memory that other libraries adopt by ``from_dlpack`` or ``__cuda_array_interface__``."""

    def __init__(self, driver: CudaDriver, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> None:
        nbytes = ARGUMENTS[dtype].bytes
        for size in shape:
            nbytes *= size
        pointer = 0
        if nbytes:
            with driver.on(device):
                pointer = driver.allocate(nbytes, stream)
        self._driver = driver
        self._stream = stream
        self.info = ArrayInfo("array", pointer, shape, contiguous_strides(shape), dtype, device)
        if pointer:
            # Not at exit: the driver may be gone by then, and the memory goes with the process.
            weakref.finalize(self, _free, driver, pointer, device, stream).atexit = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents."""
        return self.info.shape

    @property
    def dtype(self) -> str:
        """flashgen's name of the element type."""
        return self.info.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype not in _TYPESTR:
            raise AttributeError(f"__cuda_array_interface__ cannot name {self.dtype}; use __dlpack__")
        return {
            "shape": self.shape,
            "typestr": _TYPESTR[self.dtype],
            "data": (self.info.pointer, False),
            "strides": None,
            "stream": self._stream or 1,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.info.device

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        consumer = 1 if stream is None else stream
        if consumer == 0:
            raise ArgumentError("stream=0 is ambiguous in DLPack; pass 1 (legacy default) or 2 (per-thread default)")
        if consumer != -1 and consumer != (self._stream or 1):
            with self._driver.on(self.info.device):
                self._driver.wait(consumer, self._stream)
        return dlpack.export(self.info, self.__dlpack_device__(), self)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype!r}, device='cuda:{self.info.device}')"


def _free(driver: CudaDriver, pointer: int, device: int, stream: int) -> None:
    """Frees in stream order, or on the default stream when the caller has destroyed its own since."""
    with driver.on(device):
        try:
            driver.free(pointer, stream)
        except LaunchError:
            if stream not in _PLAIN_STREAMS:
                driver.free(pointer, 1)
