"""Arrays on a GPU with a stride that 32 bits cannot hold: memory is mapped where elements lie, and nowhere else."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from flashgen.errors import DriverError
from flashgen.launch.arrays import dlpack
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.driver.cuda import CudaDriver

#: Arrays that reach over more bytes than this are nearly all gap.
LARGEST_COPIED = 2**32
#: The GPU has no room for the addresses or the pieces, or this driver maps no memory at all.
_NO_SPACE = ("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED")


class HugeStrideCopy:
    """A copy of a NumPy array, whose largest stride leads from one mapping to the next."""

    def __init__(self, driver: CudaDriver, array: Any, dtype: str, ordinal: int) -> None:
        axis = max(range(array.ndim), key=lambda i: array.strides[i])
        step, pieces = array.strides[axis], [array.take(i, axis) for i in range(array.shape[axis])]
        size = pieces[0].nbytes
        with driver.on(ordinal):
            space = _Space(driver, ordinal, (len(pieces) - 1) * step + size)
            weakref.finalize(self, space.free).atexit = False
            for i, piece in enumerate(pieces):
                space.map(i * step, size)
                driver.call("cuMemcpyHtoD", space.address + i * step, piece.ctypes.data, size)
        strides = tuple(stride // array.itemsize for stride in array.strides)
        self.info = ArrayInfo("array", space.address, array.shape, strides, dtype, ordinal)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.info.device

    def __dlpack__(self, **_: Any) -> Any:
        return dlpack.export(self.info, self.__dlpack_device__(), self)


def huge_stride_copy(driver: CudaDriver, array: Any, dtype: str, ordinal: int) -> HugeStrideCopy | None:
    """A copy with the same strides; None, and a warning, where memory of the GPU cannot be mapped piece by piece."""
    try:
        return HugeStrideCopy(driver, array, dtype, ordinal)
    except DriverError as error:
        if error.status not in _NO_SPACE:
            raise
        message = "NOT CHECKED: a stride of 2^32 elements, because memory of cuda:%d cannot be mapped (%s)"
        logging.getLogger("flashgen").warning(message, ordinal, error)
        return None


class _Space:
    """Reserved addresses of a GPU."""

    def __init__(self, driver: CudaDriver, ordinal: int, size: int) -> None:
        api = driver.api
        self._driver, self._ordinal, self._mapped = driver, ordinal, list[tuple[int, int]]()
        self._kind = api.CUmemAllocationProp()
        self._kind.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = ordinal
        self._access = api.CUmemAccessDesc()
        self._access.location = self._kind.location
        self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._page = int(driver.call("cuMemGetAllocationGranularity", self._kind, least))
        self._size = -(-size // self._page) * self._page
        self.address = int(driver.call("cuMemAddressReserve", self._size, 0, 0, 0))

    def map(self, offset: int, size: int) -> None:
        """Puts NaN there, and in the rest of its pages."""
        begin = offset // self._page * self._page
        end = -(-(offset + size) // self._page) * self._page
        address, pages = self.address + begin, end - begin
        memory = self._driver.call("cuMemCreate", pages, self._kind, 0)
        try:
            self._driver.call("cuMemMap", address, pages, 0, memory, 0)
        finally:
            # The mapping keeps it.
            self._driver.call("cuMemRelease", memory)
        self._mapped.append((address, pages))
        self._driver.call("cuMemSetAccess", address, pages, [self._access], 1)
        self._driver.call("cuMemsetD8", address, 0xFF, pages)

    def free(self) -> None:
        """Unmaps all, once the GPU is done."""
        with self._driver.on(self._ordinal):
            self._driver.call("cuCtxSynchronize")
            for address, pages in self._mapped:
                self._driver.call("cuMemUnmap", address, pages)
            self._driver.call("cuMemAddressFree", self.address, self._size)
