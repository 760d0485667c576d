"""Moving NumPy arrays to a GPU and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.errors import FlashgenError

if TYPE_CHECKING:
    from flashgen.launch.arrays.device_array import DeviceArray
    from flashgen.launch.copies.huge_stride_copy import HugeStrideCopy


def to_device(array: Any, ordinal: int) -> DeviceArray | HugeStrideCopy:
    """A copy of a NumPy array on a GPU, with the same strides, and with all that lies between its elements.

    Gaps of gigabytes are left out.
    """
    from dataclasses import replace

    import numpy as np

    from flashgen.dtypes import ARGUMENTS
    from flashgen.launch.arrays.device_array import DeviceArray
    from flashgen.launch.copies.huge_stride_copy import LARGEST_COPIED, huge_stride_copy
    from flashgen.launch.driver.cuda import get_driver

    driver = get_driver()
    dtype = next((d.name for d in ARGUMENTS.values() if d.numpy() == array.dtype), None)
    if dtype is None:
        raise FlashgenError(f"dtype {array.dtype} has no row in the dtype table; convert the array first")
    if array.size == 0:
        return DeviceArray(driver, array.shape, dtype, ordinal, 1)
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    before = -sum(r for r in reach if r < 0)
    span = before + sum(r for r in reach if r > 0) + array.itemsize
    if span > LARGEST_COPIED:
        return huge_stride_copy(driver, array, dtype, ordinal) or to_device(np.ascontiguousarray(array), ordinal)
    # The legacy default stream (1): plain copies and unplaced launches are ordered by it.
    copy = DeviceArray(driver, (span // array.itemsize,), dtype, ordinal, 1)
    with driver.on(ordinal):
        driver.call("cuMemcpyHtoD", copy.info.pointer, array.ctypes.data - before, span)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    copy.info = replace(copy.info, pointer=copy.info.pointer + before, shape=array.shape, strides=strides)
    return copy


def to_host(array: DeviceArray) -> Any:
    """A NumPy copy of an array on a GPU, once all work before it is done."""
    import numpy as np

    from flashgen.dtypes import DTYPES
    from flashgen.launch.driver.cuda import get_driver

    host = np.empty(array.shape, DTYPES[array.dtype].numpy())
    if host.nbytes:
        driver = get_driver()
        with driver.on(array.info.device):
            driver.call("cuMemcpyDtoH", host.ctypes.data, array.info.pointer, host.nbytes)
    return host
