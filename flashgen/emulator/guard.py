"""Arrays beside pages that trap, so that a stray access of a kernel is a finding and not a lucky read."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from flashgen.errors import EmulationError, LaunchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PAGE = mmap.PAGESIZE
_PROT_NONE = 0
#: As 16-bit and 32-bit floats these bytes are NaN: what lies around the array must never be used.
_POISON = b"\xff"


def guarded_copy(array: NDArray[Any], *, at: Literal["end", "begin"] = "end", alignment: int = 16) -> NDArray[Any]:
    """A copy of ``array``, with the same strides, whose last byte lies just before a page that traps.

    ``at="begin"`` puts its first byte just after such a page instead. ``alignment`` is what the copy's
    address must be a multiple of; at the end of a page it may leave a gap of fewer bytes than that, which
    holds NaN. Use ``alignment=array.itemsize`` for no gap at all.
    """
    import numpy as np

    if at not in ("end", "begin"):
        raise LaunchError(f"at={at!r} is not known; use 'end' or 'begin'")
    if not 1 <= alignment <= _PAGE or alignment & (alignment - 1):
        raise LaunchError(f"alignment={alignment!r} is not a power of two from 1 to {_PAGE}; 16 suits kernels")
    before, span = _extent(array)
    pages = -(-span // _PAGE)
    memory = mmap.mmap(-1, (pages + 2) * _PAGE)
    memory[_PAGE : (pages + 1) * _PAGE] = _POISON * (pages * _PAGE)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    _trap(base)
    _trap(base + (pages + 1) * _PAGE)
    # The array's own address is what must be aligned, which is not its lowest one when a stride is negative.
    slack = pages * _PAGE - span
    offset = 0 if at == "begin" else slack - (slack + before) % alignment
    if offset < 0:
        offset = slack
    copy: NDArray[Any] = np.ndarray(array.shape, array.dtype, memory, _PAGE + offset + before, array.strides)
    copy[...] = array
    return copy


def _extent(array: NDArray[Any]) -> tuple[int, int]:
    """Bytes below the array's address, and bytes from its lowest to its highest one."""
    if array.size == 0:
        return 0, 0
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    before = -sum(r for r in reach if r < 0)
    return before, before + sum(r for r in reach if r > 0) + array.itemsize


def _trap(address: int) -> None:
    if _mprotect()(address, _PAGE, _PROT_NONE) != 0:
        code = ctypes.get_errno()
        raise EmulationError(f"a guard page cannot be made: {os.strerror(code)}; use plain arrays here")


@functools.lru_cache(maxsize=1)
def _mprotect() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
