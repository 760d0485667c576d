"""Arrays with a stride that 32 bits cannot hold: almost all of them is address space that takes no memory."""

from __future__ import annotations

import logging
import mmap
import sys
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

HugeStrideLayout: TypeAlias = Literal["huge-batch-stride", "huge-row-stride", "huge-head-stride"]
#: The dimension of (batch, length, heads, dim) whose stride is that large. In a paged cache the first one is pages.
HUGE_STRIDE_AXES: dict[HugeStrideLayout, int] = {"huge-batch-stride": 0, "huge-row-stride": 1, "huge-head-stride": 2}
#: The stride in elements. Its low 32 bits, signed or unsigned, lead to another place near the first element.
HUGE_STRIDE = 2**32 + 64
#: Bytes on either side of an array: an offset that overflows in 32 bits stays within, by elements of 4 bytes.
_MARGIN = 2**34
#: Linux's; Python has it from 3.13 on.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def empty_with_huge_stride(shape: tuple[int, ...], axis: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of zeros whose dimension ``axis`` has the stride ``HUGE_STRIDE``; the others are contiguous.

    All of it is contiguous, and a warning says so, where the process may not reserve that much address space.
    """
    if 0 in shape:
        return np.zeros(shape, dtype)
    inner = np.empty((1, *shape[:axis], *shape[axis + 1 :]), dtype)
    step = HUGE_STRIDE * dtype.itemsize
    strides = list(inner.strides[1:])
    strides.insert(axis, step)
    span = (shape[axis] - 1) * step + inner.nbytes
    try:
        memory = mmap.mmap(-1, span + 2 * _MARGIN, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, OverflowError) as error:
        logging.getLogger("flashgen").warning(
            "NOT CHECKED: a stride of 2^32 elements, because %d GiB of address space cannot be reserved (%s)",
            (span + 2 * _MARGIN) // 2**30,
            error,
        )
        return np.zeros(shape, dtype)
    array: NDArray[Any] = np.ndarray(shape, dtype, memory, _MARGIN, strides)
    return array
