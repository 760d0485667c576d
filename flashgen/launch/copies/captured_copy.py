"""Captured tensors on a GPU: elements of any type, where the arrays of a call have only those of the dtype table."""

from __future__ import annotations

from typing import Any

from flashgen.launch.arrays.device_array import DeviceArray
from flashgen.launch.driver.cuda import get_driver

#: The legacy default stream, which orders plain copies and unplaced launches.
_STREAM = 1
_UNIT = 2


class CapturedCopy:
    """A copy of a NumPy array on a GPU, to be passed as a captured tensor."""

    def __init__(self, array: Any, ordinal: int) -> None:
        import numpy as np

        array = np.ascontiguousarray(array).reshape(array.shape)
        driver = get_driver()
        # Bytes are all that is asked for; they are freed with this.
        self._memory = DeviceArray(driver, (max(1, -(-array.nbytes // _UNIT)),), "fp16", ordinal, _STREAM)
        self.shape: tuple[int, ...] = array.shape
        self.dtype = str(array.dtype)
        self._typestr = array.dtype.str
        with driver.on(ordinal):
            driver.call("cuMemcpyHtoD", self._memory.info.pointer, array.ctypes.data, array.nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self._typestr,
            "data": (self._memory.info.pointer, True),
            "strides": None,
            "stream": _STREAM,
            "version": 3,
        }
