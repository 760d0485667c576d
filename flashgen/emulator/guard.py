"""Arrays next to pages that trap, so that every stray access of a kernel is a finding."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from flashgen.errors import EmulationError, LaunchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PAGE = mmap.PAGESIZE
_PROT_NONE, _PROT_READ = 0, 1
#: Bytes on either side that trap: more than a 32-bit index of 4-byte elements can reach.
_REACH = 2**34
#: Linux's; Python has it from 3.13 on.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
#: NaN as 16-bit and 32-bit floats. It fills the memory around the array.
_POISON = b"\xff"

#: Views that span more bytes than this are not copied, because most of the span is gaps.
LARGEST_GUARDED = 2**28

Side: TypeAlias = Literal["end", "begin"]
SIDES: tuple[Side, ...] = ("end", "begin")


def guarded_copy(array: NDArray[Any], *, at: Side = "end", alignment: int = 16) -> NDArray[Any]:
    """A copy of ``array``, with the same strides, whose last byte lies just before a page that traps.

    ``at="begin"`` puts its first byte just after such a page instead. The copy's address is a multiple of
    ``alignment``, which may leave a gap of fewer bytes before the page. The gap holds NaN. Use
    ``alignment=array.itemsize`` for no gap.
    """
    import numpy as np

    _check_side(at)
    if not 1 <= alignment <= _PAGE or alignment & (alignment - 1):
        raise LaunchError(f"alignment={alignment!r} is not a power of two from 1 to {_PAGE}; 16 suits kernels")
    before, span = _extent(array)
    pages = _between_traps(span)
    # Align the array's own address, which is not its lowest one if a stride is negative.
    slack = pages.size - span
    offset = 0 if at == "begin" else slack - (slack + before) % alignment
    if offset < 0:
        offset = slack
    first = pages.reach + offset + before
    copy: NDArray[Any] = np.ndarray(array.shape, array.dtype, pages.memory, first, array.strides)
    copy[...] = array
    return copy


class GuardedRange:
    """A copy of some bytes with a page that traps right behind it (or, with ``at="begin"``, right before it).

    There is no gap, so the copy is only as aligned as its size. The sizes of arrays that kernels access by vectors
    are multiples of the vector. Stores to bytes that are not ``writable`` trap.
    """

    def __init__(self, name: str, address: int, size: int, writable: bool, at: Side) -> None:
        self.name, self.original, self.size, self.writable = name, address, size, writable
        self._pages = _between_traps(size)
        self._offset = 0 if at == "begin" else self._pages.size - size
        self.address = self._pages.address + self._offset
        ctypes.memmove(self.address, address, size)
        if not writable:
            _protect(self._pages.address, self._pages.size, _PROT_READ)

    def holds(self, address: int) -> bool:
        """Whether an address lies in the original. An empty range holds its own address."""
        return 0 <= address - self.original < max(self.size, 1)

    def copy_back(self) -> None:
        """Copies the bytes back to the original. Raises a finding if the kernel wrote next to them."""
        if not self.writable:
            return
        pages, end = self._pages, self._offset + self.size
        for where, found in (("before", pages.read(0, self._offset)), ("behind", pages.read(end, pages.size))):
            if found != _POISON * len(found):
                kind = "global memory out of bounds"
                raise EmulationError(
                    f"{kind}: a kernel of this call wrote {where} '{self.name}' ({self.size} bytes), less than a"
                    " page away; run with race=True to find the line",
                    kind=kind,
                )
        ctypes.memmove(self.original, self.address, self.size)


class GuardedCall:
    """Guarded copies of the ranges of memory (name, address, bytes, writable) that a call may access."""

    def __init__(self, ranges: Iterable[tuple[str, int, int, bool]], at: Side = "end") -> None:
        _check_side(at)
        small = (part for part in _merged(ranges) if part[2] <= LARGEST_GUARDED)
        self.ranges = tuple(GuardedRange(*part, at) for part in small)

    def moved(self, address: int) -> int:
        """The address in the copy that corresponds to an address. Addresses in no range are unchanged."""
        part = next((s for s in self.ranges if s.holds(address)), None)
        return address if part is None else address - part.original + part.address

    def copy_back(self) -> None:
        """Copies all ranges back. Raises a finding if the kernel wrote next to one."""
        for part in self.ranges:
            part.copy_back()


def _merged(ranges: Iterable[tuple[str, int, int, bool]]) -> list[tuple[str, int, int, bool]]:
    """The ranges, with overlapping ones merged, so that each address lies in at most one."""
    merged: list[tuple[str, int, int, bool]] = []
    for name, address, size, writable in sorted(ranges, key=lambda part: part[1:3]):
        last = merged[-1] if merged else ("", 0, 0, False)
        if merged and address < last[1] + max(last[2], 1):
            end = max(last[1] + last[2], address + size)
            merged[-1] = (f"{last[0]}, {name}", last[1], end - last[1], last[3] or writable)
        else:
            merged.append((name, address, size, writable))
    return merged


def _check_side(at: str) -> None:
    if at not in SIDES:
        raise LaunchError(f"at={at!r} is not known; use 'end' or 'begin'")


def _extent(array: NDArray[Any]) -> tuple[int, int]:
    """Bytes below the array's address, and bytes from its lowest to its highest address."""
    if array.size == 0:
        return 0, 0
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    before = -sum(r for r in reach if r < 0)
    return before, before + sum(r for r in reach if r > 0) + array.itemsize


@dataclass(frozen=True, slots=True)
class _Pages:
    """Usable memory inside of a mapping that traps ``reach`` bytes before and behind it."""

    memory: mmap.mmap
    address: int
    size: int
    reach: int

    def read(self, begin: int, end: int) -> bytes:
        return self.memory[self.reach + begin : self.reach + end]


def _between_traps(size: int) -> _Pages:
    """Pages for so many bytes, filled with NaN, between ranges that trap.

    The ranges use address space, but no memory. They are wide because a stray store may skip the next page, and would
    then corrupt the process.
    """
    import numpy as np

    inner = -(-size // _PAGE) * _PAGE
    memory, reach = _reserve(inner)
    memory[reach : reach + inner] = _POISON * inner
    # This view is dropped at once, because a mapping with views cannot be freed.
    start = int(np.frombuffer(memory, np.uint8).ctypes.data)
    _protect(start, reach, _PROT_NONE)
    _protect(start + reach + inner, reach, _PROT_NONE)
    return _Pages(memory, start + reach, inner, reach)


def _reserve(inner: int) -> tuple[mmap.mmap, int]:
    """A mapping for so many bytes with a reach on both sides, which is one page if address space is short."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        with suppress(OSError):
            return mmap.mmap(-1, inner + 2 * _REACH, flags), _REACH
    return mmap.mmap(-1, inner + 2 * _PAGE, flags), _PAGE


def _protect(address: int, size: int, access: int) -> None:
    if size and _mprotect()(address, size, access) != 0:
        code = ctypes.get_errno()
        raise EmulationError(f"a guard page cannot be made: {os.strerror(code)}; use plain arrays here")


@functools.lru_cache(maxsize=1)
def _mprotect() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
